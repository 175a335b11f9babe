"""An option of the loader is declared in one place: one that is planted there is found wherever options are taken."""

import os
import shutil
import subprocess
import sys

PLACE = "    shuffle: bool = option("
PLANTED = '    planted: int = option(7, "what a test plants.", least=3)\n'
LOOK = """
import inspect, sys
from pathlib import Path
import varlen as vl
from varlen.adapters.axolotl.settings import VarlenSettings
from varlen.adapters.torchtitan import PackedDataLoader
from varlen.train.configuration import read_config

option = inspect.signature(vl.PackedLoader).parameters["planted"]
assert (option.default, option.annotation, option.kind.name) == (7, int, "KEYWORD_ONLY"), option
assert "\\n    planted: what a test plants.\\n" in vl.PackedLoader.__doc__

rows = [{"input_ids": list(range(9))}] * 8
given = {"capacity": 16, "global_batch_size": 2, "worker": "thread", "columns": {}}
with vl.PackedLoader(rows, planted=5, **given) as loader:
    assert loader.settings.planted == 5

def refused(make):
    try:
        make()
    except Exception as error:
        return str(error)

assert "planted must be a whole number from 3" in refused(lambda: vl.PackedLoader(rows, planted=2, **given))

config = Path("a.toml")
config.write_text('[data]\\nsource = "store"\\ncapacity = 16\\nglobal_batch_size = 2\\n[model]\\ntype = "llama"\\n')
assert read_config(config).data.planted is None
assert read_config(config, ["data.planted=9"]).data.planted == 9
assert refused(lambda: read_config(config, ["data.planted=x"])) == "data.planted must be a whole number, got 'x'"

field = VarlenSettings.model_fields["planted"]
assert (field.default, field.description) == (7, "what a test plants.")

def titan(**settings):
    config = PackedDataLoader.Config(source=rows, worker="thread", settings=settings)
    return config.build(dp_world_size=1, dp_rank=0, seq_len=16, local_batch_size=2)

loader = titan(planted=4)
assert loader.loader.settings.planted == 4
loader.close()
assert "plante, which is no argument of vl.PackedLoader; the nearest is planted" in refused(lambda: titan(plante=4))
print("seen everywhere")
"""


def test_an_option_that_is_added_in_one_place_appears_everywhere(tmp_path, root):
    shutil.copytree(root / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    settings = tmp_path / "src" / "varlen" / "feed" / "settings.py"
    text = settings.read_text(encoding="utf-8")
    assert text.count(PLACE) == 1
    settings.write_text(text.replace(PLACE, PLANTED + PLACE), encoding="utf-8")

    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )

    assert run.stdout == "seen everywhere\n", run.stderr[-3000:]
