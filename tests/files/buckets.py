"""A bucket of S3 on the loopback with the same documents in several formats, behind a proxy that spoils requests."""

import gzip
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.files.faulty_proxy import FaultyProxy

from varlen.files.remote import file_system
from varlen.files.retry import Retry

PATIENT = Retry(attempts=6, first_s=0.005, most_s=0.02, silence_s=10, deadline_s=60)
TEXTS = [f"{number} " + chr(97 + number % 26) * (number * 37 % 700) for number in range(600)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        pa.table({"text": TEXTS, "id": range(len(TEXTS))}), sink, row_group_size=100, compression="none"
    )
    return sink.getvalue()


OBJECTS = {
    "set/a.jsonl": LINES,
    "set/b.jsonl.gz": gzip.compress(LINES, 1),
    "set/deep/c.parquet": parquet(),
    "set/deep/.hidden.jsonl": LINES,
}


@dataclass(frozen=True)
class Bucket:
    proxy: FaultyProxy
    name: str = "bucket"

    def url(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, content: bytes) -> str:
        self.proxy.spoil()
        file_system(self.url(key), PATIENT)[0].pipe_file(f"{self.name}/{key}", content, ACL="public-read")
        return self.url(key)


@contextmanager
def served() -> Iterator[Bucket]:
    """Serve a bucket with the objects as long as the context lasts."""
    from moto.moto_api._internal import moto_api_backend
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = FaultyProxy(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # moto gives the whole object's checksum with a part of it
        patch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        made = Bucket(proxy)
        fs, _ = file_system("s3://bucket", PATIENT)
        fs.mkdir("bucket")  # the client's first words take long, and aren't what is tested
        for key, content in OBJECTS.items():
            made.put(key, content)
        yield made
        fs.clear_instance_cache()
    proxy.close()
    server.stop()
    moto_api_backend.reset()  # the next server of this process would have the same buckets
