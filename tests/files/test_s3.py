"""Documents behind s3:// by a real server on the loopback: the same as from disk, whatever the server does."""

import gzip
import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import fsspec
import pytest
from tests.files.buckets import LINES, PATIENT, TEXTS, Bucket, served
from tests.files.faulty_proxy import Spoil
from tests.support.listed_files import find_files, fingerprint_files

from varlen.documents.source import Part, Source, open_source
from varlen.errors import SourceError
from varlen.files import opening, remote
from varlen.files.finding import Naming, find
from varlen.files.fingerprints import fingerprint
from varlen.files.formats import reader
from varlen.files.remote import file_system

QUICK = replace(PATIENT, silence_s=0.8, deadline_s=8)
"""Where silence is to be noticed; the rest is patient, since tests may run on a busy machine."""
FAULTS = ["busy", "broken", "refuse", "cut", "short"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with served() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_known(bucket: Bucket) -> None:
    """Begin without spoiled requests, and without what was remembered of objects by their marks."""
    bucket.proxy.spoil()
    forget()


def opened(data: str | list[str], **settings: object) -> Source:
    return open_source(data, retry=settings.pop("retry", PATIENT), append_eos=False, **settings)


def texts_of(source: Source, target_bytes: int = 64 << 20) -> list[str]:
    return [text for part in source.parts(target_bytes) for text in texts_of_part(source, part)]


def texts_of_part(source: Source, part: Part) -> list[str]:
    found = []
    for documents in source.read(part):
        content = documents.tokens.astype("uint8").tobytes()
        bounds = documents.offsets.tolist()
        found += [content[a:b].decode() for a, b in zip(bounds, bounds[1:])]
    return found


def forget() -> None:
    """Forget what is remembered of objects by their marks, so that it is asked for again."""
    opening._compressions.clear()
    opening._head_by_mark.cache_clear()
    reader._column_names_by_mark.cache_clear()
    reader._row_names_by_mark.cache_clear()


def starts_of(requests: list[str]) -> list[int]:
    return [int(request.rpartition("=")[2].split("-")[0]) for request in requests]


@pytest.mark.parametrize(
    ("named", "names"),
    [
        ("set", ["a.jsonl", "b.jsonl.gz", "deep/c.parquet"]),
        ("set/", ["a.jsonl", "b.jsonl.gz", "deep/c.parquet"]),
        ("set/*.jsonl*", ["a.jsonl", "b.jsonl.gz"]),
        ("s*t/*/*.parquet", ["set/deep/c.parquet"]),
        ("set/**/[ac].*", ["a.jsonl", "deep/c.parquet"]),
        ("set/deep/c.parquet", ["c.parquet"]),
    ],
)
def test_folders_globs_and_files_of_a_bucket_give_the_same_documents(bucket, named, names):
    source = opened(bucket.url(named))

    assert [file.name for file in source.files] == names
    assert texts_of(source) == TEXTS * len(names)


@pytest.mark.parametrize("target_bytes", [10_000, 60_000])
@pytest.mark.parametrize("key", ["set/a.jsonl", "set/deep/c.parquet"])
def test_parts_of_an_object_together_are_the_object(bucket, key, target_bytes):
    source = opened(bucket.url(key))

    assert len(source.parts(target_bytes)) > 2
    assert texts_of(source, target_bytes) == TEXTS


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("key", ["set/a.jsonl", "set/b.jsonl.gz", "set/deep/c.parquet"])
def test_one_spoiled_request_changes_nothing_whichever_it_is(bucket, key, kind):
    assert texts_of(opened(bucket.url(key)), 80_000) == TEXTS
    num_requests = len(bucket.proxy.requests)
    assert num_requests >= 4

    for number in range(1, min(num_requests, 6) + 1):
        forget()
        bucket.proxy.spoil({number: Spoil(kind=kind, after_bytes=30 * number)})

        assert texts_of(opened(bucket.url(key)), 80_000) == TEXTS


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("named", ["set", "set/*.jsonl*", "s*t/*/*.par*", "set/**/*.gz"])
def test_one_spoiled_request_changes_no_listing(bucket, named, kind):
    expected = find_files(bucket.url(named), retry=PATIENT)
    num_requests = len(bucket.proxy.requests)

    for number in range(1, num_requests + 1):
        bucket.proxy.spoil({number: Spoil(kind=kind, after_bytes=30 * number)})

        assert find_files(bucket.url(named), retry=PATIENT) == expected


def test_an_object_cut_short_again_and_again_is_read_on_from_where_it_stopped(bucket):
    source = opened(bucket.url("set/a.jsonl"))
    texts_of(source)
    bucket.proxy.spoil(always=Spoil(kind="short", after_bytes=20_000))

    assert texts_of(source) == TEXTS
    assert starts_of(bucket.proxy.requests) == list(range(0, len(LINES), 20_000))


@pytest.mark.parametrize(("seconds", "retry", "again"), [(0.2, PATIENT, False), (600, QUICK, True)])
def test_a_stall_is_waited_for_and_silence_is_asked_again(bucket, seconds, retry, again):
    file_system("s3://bucket", retry)[0].ls("bucket")
    source = opened(bucket.url("set/a.jsonl"), retry=retry)
    texts_of(source)
    bucket.proxy.spoil({1: Spoil(kind="stall", seconds=seconds)})

    assert texts_of(source) == TEXTS

    assert (len(bucket.proxy.requests) > 1) == again


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("busy", r"Please reduce your request rate.* .status 503, SlowDown.; tried 6 times in \d\.\d s"),
        ("broken", r"Something broke.* .status 500, InternalError.; tried 6 times in"),
        ("refuse", r"Connection was closed.*; tried 6 times in"),
        ("cut", r"tried 6 times in"),
        ("silent", r"tried \d times in \d\.\d s"),
    ],
)
def test_what_lasts_is_told_within_the_deadline(bucket, kind, said):
    source = opened(bucket.url("set/a.jsonl"))
    texts_of(source)
    impatient = replace(QUICK, silence_s=0.3, deadline_s=1) if kind == "silent" else PATIENT
    file_system("s3://bucket", impatient)[0].ls("bucket")
    source = replace(source, files=(replace(source.files[0], retry=impatient),))
    bucket.proxy.spoil(always=Spoil(kind=kind, after_bytes=0))

    began = time.monotonic()
    with pytest.raises(SourceError, match="s3://bucket/set/a.jsonl can't be read at byte 0: .*" + said):
        texts_of(source)

    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("kind", "spoiled", "after"),
    [
        ("forbidden", 3, r"Access Denied .status 403, AccessDenied. .after line \d+.$"),
        ("busy", 3, "after line"),
    ],
)
def test_a_read_that_fails_half_way_says_after_which_line(bucket, monkeypatch, kind, spoiled, after):
    monkeypatch.setattr(remote, "_MOST_FETCHED", 50_000)
    source = opened(bucket.url("set/a.jsonl"))
    texts_of(source)
    bucket.proxy.spoil({number: Spoil(kind=kind) for number in range(spoiled, 99)})

    with pytest.raises(SourceError, match="can't be read at byte 100,000: .*" + after):
        texts_of(source)

    assert len(bucket.proxy.requests) == spoiled + (0 if kind == "forbidden" else PATIENT.attempts - 1)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("nothing.jsonl", "s3://bucket/nothing.jsonl does not exist"),
        ("set/*.csv", "no file matches s3://bucket/set/.*csv"),
        ("nowhere/*/x.csv", "no file matches"),
    ],
)
def test_what_is_not_there_is_told_at_once(bucket, named, said):
    with pytest.raises(SourceError, match=said):
        find_files(bucket.url(named), retry=PATIENT)

    assert len(bucket.proxy.requests) <= 2


@pytest.mark.parametrize("named", ["set", "set/*.jsonl", "set/a.jsonl", "s*/**/*.parquet"])
@pytest.mark.parametrize(("kind", "num_requests"), [("busy", 6), ("forbidden", 1)])
def test_a_listing_that_fails_is_an_error_and_never_an_empty_one(bucket, named, kind, num_requests):
    bucket.proxy.spoil(always=Spoil(kind=kind))

    with pytest.raises(SourceError, match="can't be read: "):
        find_files(bucket.url(named), retry=PATIENT)

    assert len(bucket.proxy.requests) == num_requests


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LINES + b"\n", r"has changed since the files were listed: it had [\d,]+ bytes then, now [\d,]+"),
        (LINES[:-5], r"has changed since the files were listed: it had [\d,]+ bytes then, now [\d,]+"),
        (None, "it is not there .any more."),
    ],
)
@pytest.mark.parametrize("seen_before", [True, False])
def test_an_object_that_changed_after_the_listing_is_named(bucket, content, said, seen_before):
    url = bucket.put("changing.jsonl", LINES)
    source = opened(url)
    if seen_before:
        texts_of(source)

    if content is None:
        file_system(url, PATIENT)[0].rm_file("bucket/changing.jsonl")
    else:
        bucket.put("changing.jsonl", content)

    with pytest.raises(SourceError, match=said):
        texts_of(source)


def test_a_block_of_an_object_takes_one_request(bucket):
    url = bucket.put("large.jsonl", LINES * 20)
    source = opened(url)
    bucket.proxy.spoil()
    parts = source.parts(1 << 20)

    texts = [text for part in parts for text in texts_of_part(source, part)]

    assert texts == TEXTS * 20
    assert len(parts) >= 4
    assert len(bucket.proxy.requests) == len(parts) + 2  # its first bytes, its first line, and the blocks


def test_parts_of_a_parquet_object_take_few_requests(bucket):
    source = opened(bucket.url("set/deep/c.parquet"))
    bucket.proxy.spoil()
    parts = source.parts(60_000)

    texts_of(source, 60_000)

    assert len(parts) >= 2
    assert len(bucket.proxy.requests) <= 6 + 3 * len(parts)


def test_objects_are_read_side_by_side_by_many_threads(bucket):
    source = opened([bucket.url("set/a.jsonl"), bucket.url("set/deep/c.parquet")])
    bucket.proxy.spoil({number: Spoil(kind="busy") for number in range(1, 60, 3)})
    parts = source.parts(20_000)

    with ThreadPoolExecutor(8) as threads:
        found = [
            text for texts in threads.map(lambda part: texts_of_part(source, part), parts) for text in texts
        ]

    assert len(parts) > 12
    assert found == TEXTS * 2


def test_a_web_server_is_asked_again_too(bucket):
    url = f"{bucket.proxy.url}/bucket/set/a.jsonl"
    bucket.proxy.spoil()
    assert texts_of(opened(url), 80_000) == TEXTS
    num_requests = len(bucket.proxy.requests)

    for kind in FAULTS:
        for number in range(1, min(num_requests, 5) + 1):
            bucket.proxy.spoil({number: Spoil(kind=kind, after_bytes=1000)})

            assert texts_of(opened(url), 80_000) == TEXTS, (kind, number)


def test_a_web_server_that_says_nothing_is_asked_again(bucket):
    source = opened(f"{bucket.proxy.url}/bucket/set/a.jsonl", retry=QUICK)
    bucket.proxy.spoil({1: Spoil(kind="stall", seconds=600), 4: Spoil(kind="silent")})

    began = time.monotonic()
    assert texts_of(source) == TEXTS

    assert 1.6 < time.monotonic() - began < 60


def test_an_object_read_in_one_go_is_whole(bucket, monkeypatch):
    monkeypatch.setattr(remote, "_MOST_FETCHED", 50_000)
    [file] = find_files(bucket.url("set/a.jsonl"), retry=PATIENT)

    with opening.open_stored(file) as stored:
        assert stored.read() == LINES
        assert stored.seek(-5, io.SEEK_END) == len(LINES) - 5
        assert stored.read() == LINES[-5:]
        assert stored.read(5) == b""


def test_the_mark_of_an_object_is_its_fingerprint_and_costs_no_request(bucket):
    url = bucket.put("marked.jsonl", LINES)
    [file] = find_files(url, retry=PATIENT)
    bucket.proxy.spoil()

    assert fingerprint(file).startswith("etag:")
    before = fingerprint_files([file])
    assert bucket.proxy.requests == []

    bucket.put("marked.jsonl", LINES.replace(b"a", b"b", 1))
    assert fingerprint_files(find_files(url, retry=PATIENT)) != before


def test_what_is_set_for_s3_by_the_user_goes_first(bucket, monkeypatch):
    fsspec.config.conf.pop("s3", None)
    monkeypatch.setitem(
        fsspec.config.conf,
        "s3",
        {
            "key": "another",
            "secret": "anything",
            "config_kwargs": {"read_timeout": 7, "user_agent_extra": "me"},
        },
    )

    fs, path = file_system(bucket.url("set/a.jsonl"), PATIENT)

    assert path == "bucket/set/a.jsonl"
    assert fs.key == "another"
    assert fs.config_kwargs["read_timeout"] == 7
    assert fs.config_kwargs["retries"] == {"total_max_attempts": 1}
    assert texts_of(opened(bucket.url("set/a.jsonl"))) == TEXTS


@pytest.mark.parametrize("key", ["enc/a.jsonl", "enc/a.jsonl.gz"])
def test_objects_with_an_encoding_give_the_same(bucket, key):
    fs, _ = file_system(bucket.url(key), PATIENT)
    fs.pipe_file(f"{bucket.name}/{key}", gzip.compress(LINES), ContentEncoding="gzip")

    assert texts_of(opened(bucket.url(key))) == TEXTS


def test_unknown_names_of_a_bucket_cost_one_request_each_and_brackets_are_keys(bucket):
    for key in ("odd/xaa", "odd/xab", "odd/[x]/y[1].jsonl"):
        bucket.put(key, LINES)
    bucket.proxy.spoil()

    assert len(find(bucket.url("odd"), Naming(retry=PATIENT)).files) == 3
    looked = [request for request in bucket.proxy.requests if "odd/xa" in request and "GET" in request]
    assert len(looked) == 2
    find(bucket.url("odd"), Naming(retry=PATIENT))
    assert len([r for r in bucket.proxy.requests if "odd/xa" in r and "GET" in r]) == 2
    assert texts_of(opened(bucket.url("odd/[x]/y[1].jsonl"))) == TEXTS
