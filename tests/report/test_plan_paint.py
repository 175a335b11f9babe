"""What the page's script paints of a row, pixel by pixel, is what its tasks say; run in node, where there is one."""

import json
import shutil
import subprocess
from importlib.resources import files

import numpy as np
import pytest

IDLE, FORWARD, BACKWARD, SYNC, SEND = 1, 10, 11, 15, 13
WIDTH, VIEWS = 200, ((0.0, 100.0), (30.0, 40.0), (-5.0, 105.0))
AROUND = """
const WEIGHT = 2, SYNC = 5, SHADES = 1;
let byDocument = false, colours = {}, view = {};
function passOf(plan, task) { return plan.passes[plan.ofBackward[task]]; }
function isBeside(kind) { return kind > WEIGHT && kind !== SYNC; }
"""
RUN = """
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
const kinds = [10, 11, 12, 13, 14, 15, 16];
paints = { idle: 1, grid: 2, kinds, shades: kinds.map((one) => [[one, one]]), documents: [] };
const plan = given.plan;
for (const name of ["starts", "stops", "works"]) plan[name] = Float64Array.from(plan[name]);
for (const name of ["kinds", "micropacks", "chunks", "ofBackward"]) plan[name] = Int32Array.from(plan[name]);
divideLanes(plan);
plan.firsts = plan.micropacks.map(() => 0);
const said = given.views.map(([from, to]) => {
  view = { from, to };
  const line = new Uint32Array(given.width).fill(1), strip = new Uint32Array(given.width).fill(1);
  paintComputing(plan, 0, line, strip, given.width / (to - from), []);
  paintBeside(plan, 0, strip, given.width / (to - from));
  return [Array.from(line), Array.from(strip)];
});
console.log(JSON.stringify(said));
"""


def painted(starts, stops, kinds):
    """Both lines of pixels of one row, for each view."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to run it")
    room = files("varlen.report")
    drawing = room.joinpath("plan_draw.js").read_text()
    first = drawing.index("function firstAfter(")
    code = (
        AROUND
        + drawing[first : drawing.index("\n}\n", first) + 3]
        + room.joinpath("plan_paint.js").read_text()
        + RUN
    )
    of_one = {"offsets": [0, 1], "documents": [0], "shares": [0]}
    plan = {
        "rows": 1, "rowOffsets": [0, len(starts)], "passes": [of_one, of_one], "makespan": 100.0,
        "starts": starts, "stops": stops, "works": (np.array(stops) - starts).tolist(), "kinds": kinds,
        "micropacks": [0] * len(starts), "chunks": [0] * len(starts), "ofBackward": [0] * len(starts),
    }  # fmt: skip
    content = json.dumps({"plan": plan, "views": VIEWS, "width": WIDTH})
    run = subprocess.run([node, "-e", code], input=content, text=True, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return [(np.array(line), np.array(strip)) for line, strip in json.loads(run.stdout)]


@pytest.mark.parametrize("count", [3, 40, 5000])
def test_a_pixel_within_a_task_has_its_colour_and_one_between_tasks_none(count):
    """Whole pixels of one task or of nothing leave no choice; of the others any task that touches them is right."""
    random = np.random.default_rng(count)
    cuts = np.sort(random.uniform(0, 100, 2 * count))
    starts, stops = cuts[::2], cuts[1::2]
    kinds = random.integers(0, 2, count)

    lines = painted(starts.tolist(), stops.tolist(), kinds.tolist())

    for (from_, to), (line, _) in zip(VIEWS, lines):
        begins = from_ + np.arange(WIDTH) * (to - from_) / WIDTH
        ends = begins + (to - from_) / WIDTH
        touching = (starts < ends[:, None]) & (stops > begins[:, None])
        whole = (starts <= begins[:, None]) & (stops >= ends[:, None])
        for x in range(WIDTH):
            if whole[x].any():
                assert line[x] == FORWARD + kinds[whole[x]][0]
            elif not touching[x].any():
                assert line[x] == IDLE
        seen = (starts < to) & (stops > from_)
        assert set(np.unique(line)) - {IDLE} <= set((FORWARD + kinds[seen]).tolist())


def test_every_task_that_is_narrower_than_a_pixel_is_seen():
    starts = np.arange(0.2, 100, 10.0)

    ((line, _), _, _) = painted(starts.tolist(), (starts + 0.001).tolist(), [1] * 10)

    assert (line == BACKWARD).sum() == 10
    assert np.flatnonzero(line == BACKWARD).tolist() == np.floor(2 * starts).astype(int).tolist()


def test_messages_have_the_strip_and_a_sync_has_both():
    ((line, strip), _, _) = painted([0.0, 10.0, 15.0, 90.0], [20.0, 30.0, 18.0, 100.0], [0, 3, 4, 5])

    assert set(line[:40]) == {FORWARD}
    assert set(line[40:180]) == {IDLE}
    assert set(strip[:20]) == {IDLE}
    assert set(strip[20:30]) == {SEND}
    assert set(strip[36:60]) == {SEND}
    assert set(line[180:]) == set(strip[180:]) == {SYNC}


def test_the_axis_spans_the_timelines_that_are_shown():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to run it")
    drawing = files("varlen.report").joinpath("plan_draw.js").read_text()
    reach = next(line for line in drawing.splitlines() if line.startswith("const reach"))
    plans = [{"isShown": True, "makespan": 3.0}, {"isShown": False, "makespan": 90.0}]
    none = [{**plan, "isShown": False} for plan in plans]
    code = "".join(
        f"(() => {{ const plans = {json.dumps(some)};\n{reach}\nconsole.log(reach()); }})();\n"
        for some in (plans, none)
    )

    run = subprocess.run([node, "-e", code], text=True, capture_output=True, timeout=60)

    assert run.stdout.split() == ["3", "90"], run.stderr
