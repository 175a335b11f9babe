// Draws the timelines of step plans on canvases that share one time axis: zoom, pan, and point at a task.
const WEIGHT = 2, SYNC = 5;
const NAMES = ["forward", "backward", "weight gradients", "send forward", "send backward", "gradient sync", "parameter gather", "gradient scatter"];
const COLOURS = ["forward", "backward", "weight", "send", "send", "sync", "gather", "gather"];
const GUTTER = 74, RIGHT = 66, AXIS = 22, GROUP_GAP = 5, MEMORY = 92, MEMORY_GAP = 20, SHADES = 7, ZOOM = 1.35, SPARE = 150;
const host = document.getElementById("timelines");
const data = JSON.parse(document.getElementById("timeline-data").textContent);
const tip = document.getElementById("timeline-tip");

const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const array = (text, Kind) => new Kind(bytesOf(text).buffer);
const thousands = (value) => Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",");

function seconds(value, digits = 3) {
  if (Math.abs(value) < 1e-9) return "0";
  if (Math.abs(value) < 1e-3) return `${+(value * 1e6).toPrecision(digits)} µs`;
  return Math.abs(value) < 1 ? `${+(value * 1e3).toPrecision(digits)} ms` : `${+value.toPrecision(digits)} s`;
}

const plans = data.plans.map((plan) => {
  const read = { ...plan, isShown: plan.shown, box: null, canvas: null, painted: "", image: null };
  read.rows = plan.ranks.length * plan.pp;
  for (const [name, Kind] of [["rowOffsets", Int32Array], ["kinds", Uint8Array], ["micropacks", Int32Array], ["chunks", Uint8Array],
    ["starts", Float32Array], ["stops", Float32Array], ["works", Float32Array], ["ofBackward", Uint8Array], ["memoryOffsets", Int32Array], ["memoryTimes", Float32Array],
    ["memoryBytes", Float32Array], ["lengths", Int32Array], ["sharers", Int32Array]]) read[name] = array(plan[name], Kind);
  read.passes = plan.passes.map((pass) => ({
    rankOffsets: array(pass.rankOffsets, Int32Array), offsets: array(pass.offsets, Int32Array),
    documents: array(pass.documents, Int32Array), starts: array(pass.starts, Int32Array), stops: array(pass.stops, Int32Array),
  }));
  for (const pass of read.passes) pass.shares = shares(pass);
  divideLanes(read);
  read.firsts = read.micropacks.map((pack, i) => {
    const pass = passOf(read, i);
    return read.kinds[i] <= WEIGHT && pass.offsets[pack] < pass.offsets[pack + 1] ? pass.documents[pass.offsets[pack]] : 0;
  });
  return read;
});
// The axis spans what is shown, so that a fast method alone fills it.
const reach = () => Math.max(...(plans.some((plan) => plan.isShown) ? plans.filter((plan) => plan.isShown) : plans).map((plan) => plan.makespan));
let longest = reach();
const view = { from: 0, to: longest };
let pointed = null, byDocument = false, colours = {}, isAsked = false, isPrinting = false;

// Where each slice begins within its MicroPack, as a share of the tokens: a task is divided so.
function shares(pass) {
  const found = new Float32Array(pass.documents.length + 1);
  for (let pack = 0; pack + 1 < pass.offsets.length; pack++) {
    let total = 0, before = 0;
    for (let j = pass.offsets[pack]; j < pass.offsets[pack + 1]; j++) total += pass.stops[j] - pass.starts[j];
    for (let j = pass.offsets[pack]; j < pass.offsets[pack + 1]; j++) {
      found[j] = before / total;
      before += pass.stops[j] - pass.starts[j];
    }
  }
  return found;
}

function passOf(plan, task) { return plan.passes[plan.ofBackward[task]]; }
// What runs on links beside the computing: it has a strip of its own at the foot of the row.
function isBeside(kind) { return kind > WEIGHT && kind !== SYNC; }

// --- colours: the page's own, in as many shades as documents are told apart by ---
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  colours = { ink: named("ink"), quiet: named("quiet"), rule: named("rule"), grid: named("grid"), paper: named("paper"),
    idle: named("idle"), bad: named("bad"), accent: named("accent") };
  colours.kinds = COLOURS.map((name) => named(name));
  colours.shades = colours.kinds.map((base) => Array.from({ length: SHADES },
    (_, step) => mixed(base, colours.paper, 0.5 * step / (SHADES - 1))));
  colours.documents = Array.from({ length: 10 }, (_, index) => named(`d${index}`));
  readPaints();
  for (const plan of plans) plan.painted = "";
}

// --- where things lie ---
function heightOf(plan) {
  const most = plans.filter((one) => one.isShown).reduce((sum, one) => sum + one.rows, 0);
  return Math.max(8, Math.min(24, Math.floor(880 / Math.max(most, 1))));
}

function layout(plan) {
  const height = heightOf(plan), width = plan.box.clientWidth, strip = height >= 12 ? 3 : 2;
  const lanes = AXIS + plan.rows * height + (plan.ranks.length - 1) * GROUP_GAP;
  return { height, width, lanes, strip, tall: height - 1 - strip, memory: lanes + MEMORY_GAP, bottom: lanes + MEMORY_GAP + MEMORY + 6,
    top: (row) => AXIS + row * height + Math.floor(row / plan.pp) * GROUP_GAP,
    x: (time) => GUTTER + (time - view.from) / (view.to - view.from) * (width - GUTTER - RIGHT) };
}

// The part of a plan that a window shows, and some more to scroll into: no more than that is drawn, and nothing (null)
// where it shows none. What is no taller than a window is drawn wherever it is, for those who take a picture of the page.
function windowOf(plan, place) {
  const top = plan.box.getBoundingClientRect().top, seen = isPrinting ? place.bottom : window.innerHeight;
  if (isPrinting) return [0, place.bottom];
  if (place.bottom <= seen) return plan.window && plan.window[1] === place.bottom ? plan.window : [0, place.bottom];
  const first = Math.max(-top, 0), last = Math.min(seen - top, place.bottom);
  if (last < -SPARE || first > place.bottom + SPARE) return null;
  const size = Math.min(seen + 2 * SPARE, place.bottom);
  if (plan.window && plan.window[1] - plan.window[0] === size && plan.window[0] <= first && plan.window[1] >= last) return plan.window;
  const from = Math.round(Math.min(Math.max(first - SPARE, 0), place.bottom - size));
  return [from, from + size];
}

const timeAt = (x, width) => view.from + (x - GUTTER) / (width - GUTTER - RIGHT) * (view.to - view.from);

// First task of a row that ends after a time; tasks of one row and strip come one after the other.
function firstAfter(values, low, high, time) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= time) low = middle + 1; else high = middle;
  }
  return low;
}

function ticks(from, to, most) {
  const rough = (to - from) / most, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough);
  const found = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) found.push(k * step);
  return found;
}

// --- drawing ---
function draw(plan) {
  const place = layout(plan), scale = window.devicePixelRatio || 1, canvas = plan.canvas;
  plan.box.style.height = `${place.bottom}px`;
  plan.window = windowOf(plan, place);
  if (!plan.window) return;
  const [from, to] = plan.window;
  canvas.style.top = `${from}px`;
  canvas.style.height = `${to - from}px`;
  const wide = Math.round(place.width * scale), high = Math.round((to - from) * scale);
  if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
  const pen = canvas.getContext("2d");
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, wide, high);
  const moments = ticks(view.from, view.to, Math.max(3, Math.floor((place.width - GUTTER - RIGHT) / 90)));
  Object.assign(place, { scale, from: Math.max(from, AXIS), to: Math.min(to, place.lanes), rows: rowsIn(plan, place, from, to) });
  drawRows(pen, plan, place, moments, from);
  pen.setTransform(scale, 0, 0, scale, 0, -from * scale);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawAxis(pen, place, moments);
  if (pointed && pointed.plan === plan) {
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, AXIS, place.width - GUTTER - RIGHT, place.lanes - AXIS);
    pen.clip();
    drawPointed(pen, plan, place);
    pen.restore();
  }
  if (to > place.memory - 10) drawMemory(pen, plan, place, from);
  drawNames(pen, plan, place);
}

// The first row that reaches into a part of the plan, and the one behind the last.
function rowsIn(plan, place, from, to) {
  let first = 0, last = plan.rows;
  while (first < last && place.top(first) + place.height <= from) first++;
  while (last > first && place.top(last - 1) >= to) last--;
  return [first, last];
}

// The pixels of all rows are kept, for pointing changes nothing in them.
function drawRows(pen, plan, place, moments, from) {
  if (place.to <= place.from) return;
  const left = Math.round(GUTTER * place.scale), width = Math.round((place.width - GUTTER - RIGHT) * place.scale);
  const height = Math.round((place.to - place.from) * place.scale);
  if (width < 1 || height < 1) return;
  const key = [view.from, view.to, width, height, place.from, place.height, byDocument].join();
  if (plan.painted !== key) {
    if (!plan.image || plan.image.width !== width || plan.image.height !== height) plan.image = new ImageData(width, height);
    paintRows(plan, place, plan.image, moments.map((time) => Math.round((place.x(time) - GUTTER) * place.scale)));
    plan.painted = key;
  }
  pen.putImageData(plan.image, left, Math.round((place.from - from) * place.scale));
}

function drawAxis(pen, place, moments) {
  pen.textAlign = "center";
  for (const time of moments) {
    const x = Math.round(place.x(time)) + 0.5;
    pen.fillStyle = colours.grid;
    pen.fillRect(x, AXIS - 4, 1, 4);
    pen.fillRect(x, place.lanes, 1, place.bottom - place.lanes - 6);
    pen.fillStyle = colours.quiet;
    pen.fillText(seconds(time, 6), x, 9);
  }
}

function drawNames(pen, plan, place) {
  for (let row = place.rows[0]; row < place.rows[1]; row++) {
    const y = place.top(row) + place.height / 2, stage = row % plan.pp;
    const is = pointed && pointed.plan === plan && pointed.row === row;
    if (stage === 0) {
      pen.textAlign = "left";
      pen.fillStyle = colours.ink;
      pen.fillText(`rank ${plan.ranks[row / plan.pp]}`, 0, y);
    }
    if (place.height < 11 && !is) continue;
    pen.textAlign = "right";
    pen.fillStyle = is ? colours.accent : colours.quiet;
    if (plan.pp > 1) pen.fillText(`s${stage}`, GUTTER - 8, y);
    pen.fillText(`${(100 * plan.busy[row]).toFixed(0)} %`, place.width - 4, y);
  }
  pen.textAlign = "right";
  pen.fillStyle = colours.quiet;
  pen.fillText("busy", place.width - 4, 9);
}

// Everything of the document that is pointed at, in all rows and both passes.
function drawPointed(pen, plan, place) {
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 1.6;
  if (pointed.document < 0) {
    if (pointed.task < 0) return;
    const y = place.top(pointed.row), from = place.x(plan.starts[pointed.task]);
    pen.strokeRect(from, y, Math.max(place.x(plan.stops[pointed.task]) - from, 1.5), place.height - 1);
    return;
  }
  if (plan.ownOf !== pointed.document) {
    plan.ownOf = pointed.document;
    plan.own = plan.passes.map((pass) => slicesOf(pass, pointed.document));
  }
  for (let row = place.rows[0]; row < place.rows[1]; row++) {
    const last = plan.laneOffsets[2 * row + 1];
    for (let i = firstOf(plan, 2 * row, view.from); i < last && plan.starts[i] < view.to; i++) {
      if (plan.kinds[i] > WEIGHT) continue;
      const slices = plan.own[plan.ofBackward[i]].get(plan.micropacks[i]);
      if (!slices) continue;
      const pass = passOf(plan, i), from = place.x(plan.starts[i]), width = place.x(plan.starts[i] + plan.works[i]) - from;
      for (const j of slices) {
        const left = from + pass.shares[j] * width, right = from + endShare(pass, plan.micropacks[i], j) * width;
        pen.strokeRect(left, place.top(row) + 0.5, Math.max(right - left - 0.8, 1.2), place.tall - 1);
      }
    }
  }
}

const endShare = (pass, pack, j) => (j + 1 < pass.offsets[pack + 1] ? pass.shares[j + 1] : 1);

function slicesOf(pass, id) {
  const found = new Map();
  for (let pack = 0; pack + 1 < pass.offsets.length; pack++) {
    for (let j = pass.offsets[pack]; j < pass.offsets[pack + 1]; j++) {
      if (pass.documents[j] === id) found.set(pack, [...(found.get(pack) || []), j]);
    }
  }
  return found;
}

function drawMemory(pen, plan, place, windowTop) {
  const top = place.memory, bottom = top + MEMORY, most = Math.max(plan.limit, ...plan.peaks) * 1.06;
  const up = (value) => bottom - value / most * MEMORY;
  pen.textAlign = "right";
  pen.fillStyle = colours.quiet;
  for (const value of ticks(0, most / 1e9, 4)) {
    pen.fillText(`${value} GB`, GUTTER - 8, up(value * 1e9));
    pen.fillStyle = colours.grid;
    pen.fillRect(GUTTER, Math.round(up(value * 1e9)), place.width - GUTTER - RIGHT, 1);
    pen.fillStyle = colours.quiet;
  }
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, top - 2, place.width - GUTTER - RIGHT, MEMORY + 4);
  pen.clip();
  const highest = plan.peaks.indexOf(Math.max(...plan.peaks));
  const bold = pointed && pointed.plan === plan ? pointed.row : highest;
  drawCurves(pen, plan, place, windowTop, most);
  pen.strokeStyle = colours.accent;
  pen.lineWidth = 1.7;
  drawCurve(pen, plan, place, bold, up);
  pen.strokeStyle = colours.bad;
  pen.lineWidth = 1.2;
  pen.setLineDash([5, 4]);
  pen.beginPath();
  pen.moveTo(GUTTER, up(plan.limit));
  pen.lineTo(place.width - RIGHT, up(plan.limit));
  pen.stroke();
  pen.setLineDash([]);
  pen.restore();
  pen.textAlign = "left";
  pen.fillStyle = colours.bad;
  pen.fillText("limit", place.width - RIGHT + 6, up(plan.limit));
  pen.fillStyle = colours.accent;
  const away = Math.abs(up(plan.limit) - up(plan.peaks[bold])) < 13 ? up(plan.limit) + 13 : up(plan.peaks[bold]);
  pen.fillText(`peak ${(plan.peaks[bold] / 1e9).toFixed(1)}`, place.width - RIGHT + 6, away);
}

// The curves of all stages, as pixels on a canvas of their own, which are kept until the view changes.
function drawCurves(pen, plan, place, windowTop, most) {
  const width = Math.round((place.width - GUTTER - RIGHT) * place.scale), height = Math.round(MEMORY * place.scale);
  if (width < 1) return;
  const key = [view.from, view.to, width, height].join();
  if (!plan.curves) plan.curves = document.createElement("canvas");
  if (plan.curvesOf !== key || !plan.painted) {
    if (plan.curves.width !== width || plan.curves.height !== height) { plan.curves.width = width; plan.curves.height = height; }
    const image = new ImageData(width, height);
    paintMemory(plan, image, most, Math.max(0.12, Math.min(0.6, 5 / plan.rows)));
    plan.curves.getContext("2d").putImageData(image, 0, 0);
    plan.curvesOf = key;
  }
  pen.drawImage(plan.curves, GUTTER, place.memory, width / place.scale, MEMORY);
}

// A curve of steps; of the points within one pixel only the lowest and the highest are drawn.
function drawCurve(pen, plan, place, row, up) {
  const low = plan.memoryOffsets[row], high = plan.memoryOffsets[row + 1];
  if (low === high) return;
  let i = Math.max(low, firstAfter(plan.memoryTimes, low, high, view.from) - 1);
  let y = up(plan.memoryBytes[i]);
  pen.beginPath();
  pen.moveTo(place.x(Math.max(plan.memoryTimes[i], view.from)), y);
  for (i += 1; i < high && plan.memoryTimes[i] <= view.to;) {
    const x = place.x(plan.memoryTimes[i]);
    let least = plan.memoryBytes[i], most = least, now = least;
    for (i += 1; i < high && place.x(plan.memoryTimes[i]) < x + 0.7; i++) {
      now = plan.memoryBytes[i];
      least = Math.min(least, now);
      most = Math.max(most, now);
    }
    pen.lineTo(x, y);
    if (up(least) - up(most) > 1) { pen.lineTo(x, up(most)); pen.lineTo(x, up(least)); }
    y = up(now);
    pen.lineTo(x, y);
  }
  pen.lineTo(place.x(Math.min(plan.makespan, view.to)), y);
  pen.stroke();
}

function redraw() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    for (const plan of plans) if (plan.isShown) draw(plan);
  });
}

// Scrolling shows what is drawn already, until it comes to the end of that.
function scrolled() {
  for (const plan of plans) {
    if (plan.isShown && windowOf(plan, layout(plan)) !== plan.window) { redraw(); return; }
  }
}
