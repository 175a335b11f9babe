"""vl.verify: every cell has a verdict from a run, leaks are found and explained, and the model is left as it was."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.hf_models import SMALL, VOCABULARY, make, packed, tiny, verified
from tests.support.rarely import mostly
from transformers import FalconConfig, LlamaConfig, MixtralConfig
from transformers.utils import logging

import varlen as vl
from varlen.errors import DocumentsError, ModelError, SettingError
from varlen.verify.models import backends
from varlen.verify.models.api import CALLS
from varlen.verify.models.loading import tiny_model

BACKENDS = ("eager", "sdpa", "flex_attention", "varlen", "flash_attention_2")
FUSED = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(scope="module")
def llama() -> vl.VerifyReport:
    return verified("llama")


@pytest.fixture(autouse=True)
def the_loudness_of_transformers_stays() -> Iterator[None]:
    before = logging.get_verbosity()
    yield
    assert logging.get_verbosity() == before


def test_every_backend_and_layout_has_a_cell_and_none_is_silent(llama):
    assert [(cell.backend, cell.layout) for cell in llama.cells] == [
        (backend, layout) for backend in BACKENDS for layout in ("rows", "flat")
    ]
    for cell in llama.cells:
        assert cell.verdict == "isolated", str(llama)
        assert cell.reason == ""
        assert cell.isolation is not None
        assert cell.isolation.movements.largest_difference == 0
        assert cell.isolation.movements.control_difference > 0.1  # type: ignore[operator]
    assert llama.ok
    assert llama.verdict == "isolated"


def test_gradients_are_compared_wherever_there_is_a_backward(llama):
    for cell in llama.cells:
        assert cell.gradients is not None
        if cell.backend == "flex_attention":
            assert cell.gradients.difference is None
            assert "backward on CPU" in cell.gradients.reason
        else:
            assert cell.gradients.difference is not None
            assert cell.gradients.difference < 1e-5 < 0.1 < cell.gradients.control  # type: ignore[operator]
            assert cell.gradients.parameters == 21
            assert cell.gradients.loss == pytest.approx(cell.gradients.alone_loss, rel=1e-6)
            assert cell.own_loss == pytest.approx(cell.gradients.loss, rel=1e-5)


def test_the_kernels_that_ran_are_named_and_stand_ins_marked(llama):
    assert llama.cell("eager").kernels == (("softmax", 2),)
    assert llama.cell("sdpa").kernels == ((FUSED, 2),)
    assert llama.cell("flex_attention").kernels == (("flex_attention", 2),)
    assert llama.cell("varlen").kernels[0][0] == FUSED
    for cell in llama.cells:
        is_flash = cell.backend == "flash_attention_2"
        assert cell.stand_in == ((backends.FLASH,) if is_flash else ())


# As transformers' two detectors of boundaries decide: rows and flat, for each way of calling.
TRUTH = {
    "position_ids, use_cache=False": {"inferring": ("isolated", "isolated"), "flash": ("leaks", "isolated")},
    "position_ids, use_cache=True": {"inferring": ("leaks", "leaks"), "flash": ("leaks", "isolated")},
    "position_ids, attention_mask of ones": {"inferring": ("leaks", "leaks"), "flash": ("leaks", "isolated")},
    # All ones in one row, which has no padding.
    "position_ids, attention_mask 0 at padding": {
        "inferring": ("leaks", "leaks"),
        "flash": ("leaks", "isolated"),
    },
    "position_ids, attention_mask of numbers": {
        "inferring": ("leaks", "leaks"),
        "flash": ("leaks", "isolated"),
    },
    "position_ids, cu_seq_lens, max_length": {
        "inferring": ("isolated", "isolated"),
        "flash": ("isolated", "isolated"),
    },
    "position_ids, cu_seq_lens, max_length, seq_idx": {
        "inferring": ("isolated", "isolated"),
        "flash": ("isolated", "isolated"),
    },
    "input_ids alone": {"inferring": ("leaks", "leaks"), "flash": ("leaks", "leaks")},
}


def test_every_way_of_calling_leaks_where_transformers_forgets_boundaries(llama):
    assert list(TRUTH) == [call.name for call in CALLS]
    found: dict[tuple[str, str], list[str]] = {}
    for cell in llama.calls:
        found.setdefault((cell.call, cell.backend), []).append(cell.verdict)
    for (call, backend), verdicts in found.items():
        if backend == "varlen":
            told = "cu_seq_lens" in call
            assert verdicts == ["isolated" if told else "refuses"] * 2, call
        else:
            kind = "flash" if backend == "flash_attention_2" else "inferring"
            assert tuple(verdicts) == TRUTH[call][kind], (call, backend)


def test_every_leak_is_explained(llama):
    assert llama.leaks
    for cell in llama.leaks:
        assert cell.why, cell
        assert cell.difference is not None
        assert cell.difference > 1e-3
        assert cell.fix or cell.call == "input_ids alone"
    kinds = {cell.call: cell.kind for cell in llama.leaks if cell.backend == "sdpa" and cell.layout == "rows"}
    assert kinds["position_ids, use_cache=True"] == "use_cache"
    assert kinds["position_ids, attention_mask of ones"] == "attention_mask"


def test_a_family_that_never_looks_at_positions_is_isolated_by_us_and_leaks_otherwise():
    report = vl.verify("opt", backends=["eager", "sdpa"])

    assert report.ok
    plain = [cell for cell in report.calls if cell.call == "position_ids, use_cache=False"]
    assert [cell.verdict for cell in plain] == ["leaks"] * 4
    assert "never looks at position_ids" in plain[0].why


def test_a_live_model_that_can_not_change_its_attention_is_copied_with_its_weights():
    config = FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = make(config, "sdpa", torch.float32)
    report = vl.verify(model, backends=["eager"], calls=False)

    assert report.ok
    assert model.config._attn_implementation == "sdpa"
    loss = report.cell("eager").gradients.loss  # type: ignore[union-attr]
    assert loss == pytest.approx(vl.verify(model, backends=["sdpa"], calls=False).cell("sdpa").gradients.loss)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["nemotron", "stablelm"])
def test_layers_that_drop_boundaries_are_refused_where_nothing_else_tells_them(family):
    report = vl.verify(family, backends=["varlen", "flash_attention_2"])

    assert report.cell("flash_attention_2", "flat").verdict == "isolated"
    for cell in (report.cell("varlen"), report.cell("varlen", "flat"), report.cell("flash_attention_2")):
        assert cell.verdict == "refuses"
        assert "DecoderLayer drops its keyword arguments" in cell.reason
    told = [c for c in report.calls if "cu_seq_lens" in c.call and c.backend == "flash_attention_2"]
    assert {(cell.layout, cell.verdict) for cell in told} == {("rows", "leaks"), ("flat", "isolated")}
    assert "hands cu_seq_lens_q on to no layer" in next(cell.why for cell in told if cell.why)


def test_a_model_that_drops_block_masks_is_refused():
    cell = vl.verify("doge", backends=["flex_attention"], layouts=["rows"], calls=False).cells[0]

    assert cell.verdict == "refuses"
    assert "drops those of FlexAttention" in cell.reason


def test_recurrent_layers_run_by_stand_ins_and_leak_without_their_arguments():
    report = vl.verify("bamba", backends=["sdpa"], layouts=["flat"])
    cell = report.cells[0]

    assert cell.verdict == "isolated"
    assert "causal_conv1d_fn" in cell.stand_in
    verdicts = {c.call: c for c in report.calls}
    assert verdicts["position_ids, cu_seq_lens, max_length, seq_idx"].verdict == "isolated"
    leaking = verdicts["position_ids, cu_seq_lens, max_length"]
    assert leaking.verdict == "leaks"
    assert "read boundaries from seq_idx and there is none" in leaking.why


def test_a_recurrent_family_that_takes_no_boundaries_is_refused():
    report = vl.verify("mamba", backends=["eager"], layouts=["rows"])

    assert report.verdict == "refuses"
    assert not report.ok
    assert "a mask doesn't keep documents apart" in report.cells[0].reason
    assert report.calls[0].verdict == "leaks"


def test_a_routers_loss_over_the_batch_is_coupled_and_no_leak():
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    config.output_router_logits = True
    report = vl.verify(make(config, "eager", torch.float32), backends=["varlen", "sdpa"], calls=False)

    assert [cell.verdict for cell in report.cells] == ["coupled", "coupled", "refuses", "refuses"]
    assert report.verdict == "coupled"
    assert not report.ok
    assert "its auxiliary loss over the whole batch" in report.cells[0].reason
    # transformers' code would fail on a 4-D mask.
    assert "use_varlen_attention(model)" in report.cells[2].reason
    config.output_router_logits = False
    assert vl.verify(make(config, "eager", torch.float32), backends=["varlen", "sdpa"], calls=False).ok


def test_what_is_computed_over_the_whole_batch_is_coupled_and_no_leak():
    model = make(LlamaConfig(**SMALL), "sdpa", torch.float32)
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden / hidden.abs().mean())
    report = vl.verify(model, backends=["sdpa"], layouts=["rows"])

    assert report.verdict == "coupled"
    assert "over its whole batch" in report.cells[0].reason
    leaking = next(cell for cell in report.calls if cell.call == "input_ids alone")
    assert leaking.verdict == "leaks"


# PyTorch's own quantisation is on its way out, and the only one that needs no package and no GPU.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_scales_of_quantised_activations_are_coupled_and_no_leak():
    model = torch.ao.quantization.quantize_dynamic(tiny_model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    report = vl.verify(model, backends=["eager"], layouts=["rows"])

    assert report.verdict == "coupled"
    assert "quantised (by PyTorch)" in report.notes
    assert {cell.call for cell in report.leaks} >= {"position_ids, use_cache=True", "input_ids alone"}


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of what imports Inductor first
def test_a_compiled_model_is_checked_as_its_modules_say():
    report = vl.verify(torch.compile(tiny_model("llama")), backends=["eager"], layouts=["rows"], calls=False)

    assert report.ok
    assert "compiled: its modules were checked uncompiled" in report.notes


def test_the_model_is_left_as_it_was():
    model = tiny("gemma2", "eager", torch.float32).train()
    model(**vl_inputs(model)).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    config, random = copy.deepcopy(model.config.to_dict()), torch.get_rng_state()
    vl.verify(model, layouts=["rows"])

    assert model.config._attn_implementation == "eager"
    assert model.config.to_dict() == config
    assert all(module.training for module in model.modules())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), random)


def vl_inputs(model: Any) -> dict[str, Any]:
    from varlen.adapters import hf

    return hf.model_inputs(packed(), model)


def test_a_batch_of_ones_own_decides_the_layout():
    report = vl.verify(tiny("llama", "sdpa"), backends=["sdpa"], batch=packed("flat"), calls=False)

    assert [cell.layout for cell in report.cells] == ["flat"]
    assert report.cells[0].isolation.documents == 7  # type: ignore[union-attr]


def test_windows_wider_than_the_documents_are_told():
    model = make(LlamaConfig(**SMALL), "eager", torch.float32)
    model.config.sliding_window = 4096
    notes = vl.verify(model, backends=["eager"], layouts=["rows"], calls=False).notes

    assert any("windows of 4,096 tokens are wider than the longest document" in note for note in notes)


def test_rows_are_made_longer_than_a_models_windows():
    model = make(LlamaConfig(**SMALL | {"max_position_embeddings": 512}), "eager", torch.float32)
    model.config.sliding_window = 100
    report = vl.verify(model, backends=["eager"], layouts=["rows"], calls=False, gradients=False)

    assert report.notes == ()
    assert "116]" in report.cells[0].isolation.layout  # type: ignore[union-attr]


def test_a_model_with_few_positions_gets_short_documents():
    model = make(LlamaConfig(**SMALL | {"max_position_embeddings": 12}), "eager", torch.float32)

    assert vl.verify(model, backends=["eager"], calls=False).ok


def test_a_model_that_fails_in_its_own_forward_is_refused_with_its_error():
    model = tiny("llama", "eager", torch.float32)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("expected two tensors")

    model.model.layers[0].mlp.forward = failing
    report = vl.verify(model, backends=["eager"], layouts=["rows"])

    assert report.verdict == "refuses"
    assert "fails in its own forward: RuntimeError: expected two tensors" in str(report)


def test_a_blind_check_is_not_taken_for_isolation():
    model = tiny("llama", "sdpa", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    cell = vl.verify(model, backends=["sdpa"], layouts=["rows"], calls=False).cells[0]

    assert cell.verdict == "not run"
    assert "a leak can't be seen" in cell.reason


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"backends": ["paged"]}, SettingError, "backends must be one or more of eager, sdpa"),
        ({"backends": []}, SettingError, "got none"),
        ({"backends": ["eager", "eager"]}, SettingError, "each once; got eager, eager"),
        ({"layouts": ["columns"]}, SettingError, "layouts must be one or more of rows, flat"),
        ({"layouts": []}, SettingError, "layouts must be"),
        ({"batch": {"input_ids": [[1]]}}, DocumentsError, "must be a PackedBatch"),
    ],
)
def test_settings_that_there_are_not_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        vl.verify("llama", **settings)


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(ModelError, match="no transformers config"):
        vl.verify(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "family",
    mostly(["falcon", "gpt2"], ["llama", "falcon", "gpt_oss", "stablelm", "qwen3_next", "bamba", "gpt2"]),
)
def test_what_check_batch_says_of_every_call_is_what_a_run_finds(family):
    """All backends, layouts and calls: an error without a leak, or a leak without an error, would be a wrong word."""
    for cell in vl.verify(family, gradients=False).calls:
        if cell.verdict in ("isolated", "leaks") and cell.call != "input_ids alone":
            assert (cell.kind != "") is (cell.verdict == "leaks"), cell
