"""The demo's HTML report, from its figures."""

from __future__ import annotations

from html import escape
from statistics import fmean, median

from varlen.counts import as_size, many
from varlen.report import drawing
from varlen.report.demo import DemoFigures, MethodFigures, findings, headline, loss_gap, spread
from varlen.report.drawing import pack_figure
from varlen.report.page import (
    NARROW,
    WIDE,
    caption_of,
    count,
    difference,
    facts,
    figure,
    numbers,
    page,
    paragraph,
    percent,
    section,
    table,
    times,
    twice,
)


def demo_page(figures: DemoFigures) -> str:
    """Return the report as one self-contained HTML page."""
    found = findings(figures)
    return page(
        "varlen demo",
        [
            _opening(figures),
            section("Speed", paragraph(found.padding), _speed(figures), _ratios(figures)),
            section("Where the time goes", _padding(figures)),
            section("The loss", paragraph(found.loss), _losses(figures)),
            section("Against length buckets", paragraph(found.buckets)),
            section("Memory", _memory(figures)),
            section("A packed row and its mask", paragraph(found.packed), _row(figures)),
            section(
                "Proof of isolation",
                _verdict(figures),
                facts(figures.isolation.rows),
                paragraph(found.control),
            ),
            section("The ledger", _ledger(figures)),
            section("The documents", _documents(figures)),
            section("What a CPU inflates", paragraph(found.inflation), _cpu(figures)),
            section("How it was measured", _setup(figures)),
        ],
    )


def _opening(figures: DemoFigures) -> str:
    ours, padded, masked = (figures.method(name) for name in ("flattened", "padded", "padded_with_mask"))
    largest = (
        ("varlen", times(ours.tokens_per_s / padded.tokens_per_s), "tokens per second vs padded, no mask"),
        ("", times(ours.tokens_per_s / masked.tokens_per_s), "against padded with a mask"),
        ("", times(padded.slots_per_token), "positions per token when padded: what padding alone explains"),
        (
            "",
            times(padded.memory_bytes / max(ours.memory_bytes, 1)),
            "memory of a padded step over a flattened one",
        ),
    )
    lead = (
        f"A Llama of {figures.num_parameters / 1e6:.1f} million parameters learns {ours.num_targets:,} "
        f"targets from {ours.num_documents:,} documents ({figures.corpus.description}) in "
        f"{figures.steps:,} steps, {len(figures.methods)} times over. "
        "Only the way that the documents are fed differs."
    )
    return (
        '<header><p class="kicker"><b>varlen</b> demo</p>'
        f"<h1>{escape(headline(figures))}</h1>{paragraph(lead, 'lead')}</header>" + numbers(largest)
    )


def _speed(figures: DemoFigures) -> str:
    rows = [
        drawing.Bar(label=m.title, value=m.tokens_per_s, note=count(m.tokens_per_s), kind=m.role)
        for m in figures.methods
    ]
    label = "effective tokens per second of each method"
    return figure(
        drawing.bars(rows, WIDE, label),
        drawing.bars(rows, NARROW, label),
        "Effective tokens per second: tokens of documents, padding not counted, over the time from the "
        f"documents' tokens to the updated weights. {figures.threads} threads; methods took turns step by "
        "step, so that whatever else the machine did hit all alike.",
    )


def _ratios(figures: DemoFigures) -> str:
    ours = figures.method("flattened")
    rows = [
        (
            method.role,
            (
                method.title,
                count(method.tokens_per_s),
                count(method.tokens_per_cpu_s),
                times(ours.tokens_per_s / method.tokens_per_s),
                times(ours.tokens_per_cpu_s / method.tokens_per_cpu_s),
                f"{method.slots_per_token:.2f}",
            ),
        )
        for method in figures.methods
    ]
    head = (
        "",
        "tokens per second",
        "tokens per CPU second",
        "flattened is faster by, wall",
        "by, CPU time",
        "positions per token",
    )
    return table(head, rows)


def _padding(figures: DemoFigures) -> str:
    batch = figures.picture.batch
    longest = max(piece.num_tokens for piece in batch)
    slots, tokens = longest * len(batch), sum(piece.num_tokens for piece in batch)
    half = (WIDE - 40) // 2
    return (
        '<div class="pair"><div><h3>Padded</h3>'
        + twice(drawing.padded_batch(batch, half), drawing.padded_batch(batch, NARROW))
        + "</div><div><h3>Flattened</h3>"
        + twice(drawing.flattened_batch(batch, half), drawing.flattened_batch(batch, NARROW))
        + "</div></div>"
        + caption_of(
            f"The first random batch, {len(batch)} documents, to one scale. Padded to its longest document "
            f"it has {slots:,} positions, of which {tokens:,} hold a token ({percent(tokens / slots)}). "
            "Flattened, the same documents stand end to end, broken here into lines of the same width."
        )
    )


def _losses(figures: DemoFigures) -> str:
    rows = [
        drawing.Dots(
            label=method.title,
            values=figures.losses(method),
            note=f"{fmean(figures.losses(method)):.3f} ± {spread(figures.losses(method)):.3f}",
            kind=method.role,
        )
        for method in figures.methods
    ]
    label = "validation loss of each method, one dot a seed"
    ours = figures.method("flattened")
    gaps = []
    for method in figures.methods:
        gap, gap_spread = loss_gap(figures, method, ours)
        gaps.append(
            (method.role, (method.title, f"{difference(gap)} ± {gap_spread:.3f}", _origin(figures, method)))
        )
    return figure(
        drawing.dots(rows, WIDE, label, _loss_words),
        drawing.dots(rows, NARROW, label, _loss_words),
        f"Validation loss in nats after {figures.steps:,} steps; a dot for each of {len(figures.seeds)} "
        "seeds, their mean as a stroke, and half their range after ±. Seeds change documents, batches and "
        "initial weights, so compare within a seed, as the table does. So few steps show equality, not a "
        "trained model.",
    ) + table(("", "loss above flattened, same seed", "trained in its own layout"), gaps)


def _origin(figures: DemoFigures, method: MethodFigures) -> str:
    """Return for which seeds a method was trained, and whose losses stand for its other seeds."""
    if method.same_loss_as is not None and None in method.validation_losses:
        twin = figures.method(method.same_loss_as)
        return f"seed {figures.seeds[0]}; further seeds: {twin.title}, same batches"
    if method.name == "bucketed" and len(figures.seeds) > 1:
        return f"seed {figures.seeds[0]}; further seeds: the same batches flattened"
    return "every seed"


def _memory(figures: DemoFigures) -> str:
    rows = [
        drawing.Bar(label=m.title, value=m.memory_bytes, note=as_size(m.memory_bytes), kind=m.role)
        for m in figures.methods
    ]
    label = "peak memory of each method"
    return figure(
        drawing.bars(rows, WIDE, label),
        drawing.bars(rows, NARROW, label),
        "Most memory that a step held, beyond what its process held before the first step (interpreter, "
        "torch, model). Every method ran in a process of its own; the peak is the operating system's count "
        "of resident memory. All methods form logits in blocks, so none pays for them all at once.",
    )


def _row(figures: DemoFigures) -> str:
    return pack_figure(
        figures.picture.row, figures.picture.capacity, "The packed row with the most documents"
    )


def _verdict(figures: DemoFigures) -> str:
    proof = "the control leaked, as it must" if figures.isolation.is_proved else "not proved"
    return f'<p class="verdict"><b>{escape(figures.isolation.verdict)}</b> ({escape(proof)})</p>' + paragraph(
        "On the model that the packed run trained, one document of a packed row is changed at a time, and "
        "the logits of all others must not move by a single bit. Without boundaries they must move, or the "
        "check is blind."
    )


def _ledger(figures: DemoFigures) -> str:
    ledger = figures.ledger
    return (
        f'<p class="sum">{ledger.tokens_in:,} <small>tokens in</small> = '
        f"{ledger.packed:,} <small>packed</small> + {ledger.truncated:,} <small>cut</small> + "
        f"{ledger.dropped:,} <small>dropped</small>; {ledger.duplicated:,} <small>twice</small>, "
        f"{ledger.balance:,} <small>unaccounted for</small></p>"
        + paragraph(
            f"Of {many(ledger.documents_in, 'document')}, those longer than {figures.max_length:,} tokens "
            f"({ledger.truncated_documents:,}) lose their end, in every method alike. Packed tokens are "
            "counted from the finished packs. Every method trained each document once and "
            f"{figures.method('packed').num_targets:,} targets; the demo stops if they differ."
        )
    )


def _documents(figures: DemoFigures) -> str:
    corpus = figures.corpus
    label = "lengths of documents on a log axis, by share of documents and of tokens"
    drawn = (
        f"{corpus.documents_found:,} documents were found"
        + (" before reading stopped" if corpus.is_cut else "")
        + f"; {corpus.num_documents:,} of them are shown"
        + (f" ({corpus.too_short:,} of fewer than two tokens left out)" if corpus.too_short else "")
    )
    return figure(
        drawing.histogram(corpus.lengths, figures.max_length, WIDE, label),
        drawing.histogram(corpus.lengths, figures.max_length, NARROW, label),
        f"Length in tokens, half an octave a bar: {corpus.description}. {drawn}. Median "
        f"{median(corpus.lengths):,.0f}, mean {fmean(corpus.lengths):,.0f}, longest "
        f"{max(corpus.lengths):,} tokens. Padded in random batches of {figures.batch_documents}, all of them "
        f"would take {corpus.padded_ratio:.2f} positions a token; sorted {corpus.bucket_pool:,} at a time, "
        f"{corpus.bucketed_ratio:.2f}. Each seed trains on a draw that is even over the lengths.",
    )


def _cpu(figures: DemoFigures) -> str:
    ours = figures.method("flattened")
    rows = [
        (
            method.role,
            (
                method.title,
                f"{method.wall_s:.1f} s",
                f"{method.user_s:.1f} s",
                f"{method.system_s:.1f} s",
                percent(method.system_s / method.cpu_s),
                times(method.user_s / ours.user_s),
            ),
        )
        for method in figures.methods
    ]
    head = ("", "wall", "CPU, user", "CPU, system", "system's share", "user time over flattened")
    return table(head, rows)


def _setup(figures: DemoFigures) -> str:
    rows = (
        (
            "documents",
            f"{figures.corpus.description}; {figures.corpus.vocab_size:,} tokens of a byte-level BPE",
        ),
        (
            "steps, batch",
            f"{figures.steps:,} of {figures.batch_documents:,} documents, cut at {figures.max_length:,}",
        ),
        ("seeds", ", ".join(str(seed) for seed in figures.seeds)),
        ("model", f"Llama, {figures.num_parameters:,} parameters, float32; AdamW; token mean loss"),
        ("threads", str(figures.threads)),
        *figures.machine,
        ("whole demo", f"{figures.total_s:.0f} s"),
    )
    return facts(rows) + paragraph(
        "All methods share the initial weights, the optimizer, and a loss that runs the head over every "
        "position, padding included, as transformers does. Padded without a mask, attention runs in the same "
        "kernel as per document. Times are those of one run, and other work on the machine is in them."
    )


def _loss_words(value: float) -> str:
    return f"{value:.2f}"
