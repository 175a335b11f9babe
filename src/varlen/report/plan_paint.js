// Paints rows and memory curves into pixels: tens of thousands of tasks a frame are too many calls of a canvas.
const littleEndian = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;

// A colour of the page, "#rrggbb", as one pixel.
function pixelOf(text, alpha = 255) {
  const value = parseInt(text.slice(1), 16);
  const [red, green, blue] = [value >> 16, (value >> 8) & 255, value & 255];
  return littleEndian ? (alpha << 24 | blue << 16 | green << 8 | red) >>> 0 : (red << 24 | green << 16 | blue << 8 | alpha) >>> 0;
}

function mixed(one, other, share) {
  const part = (text, at) => parseInt(text.slice(at, at + 2), 16);
  const mix = (at) => Math.round(part(one, at) * (1 - share) + part(other, at) * share).toString(16).padStart(2, "0");
  return `#${mix(1)}${mix(3)}${mix(5)}`;
}

// What is painted with: two pixels a shade, the second for the line at which a slice begins.
let paints = {};
function readPaints() {
  const pair = (text) => [pixelOf(text), pixelOf(mixed(text, colours.paper, 0.6))];
  paints = { idle: pixelOf(colours.idle), grid: pixelOf(colours.grid), kinds: colours.kinds.map((text) => pixelOf(text)),
    shades: colours.shades.map((row) => row.map(pair)), documents: colours.documents.map(pair) };
}

const shadeOf = (id) => Math.floor(((id * 0.6180339887) % 1) * SHADES);

function paintOf(kind, id) {
  if (byDocument && kind <= WEIGHT) return paints.documents[id % 10];
  return paints.shades[kind][shadeOf(id)];
}

// Tasks of a row in two lanes, what computes and what runs on links beside it, each by its start; so that ends rise
// in the first, and a view finds its tasks by halving.
function divideLanes(plan) {
  const count = plan.kinds.length, order = new Int32Array(count);
  plan.laneOffsets = new Int32Array(2 * plan.rows + 1);
  let place = 0;
  for (let row = 0; row < plan.rows; row++) {
    for (const beside of [false, true]) {
      for (let i = plan.rowOffsets[row]; i < plan.rowOffsets[row + 1]; i++) if (isBeside(plan.kinds[i]) === beside) order[place++] = i;
      plan.laneOffsets[2 * row + (beside ? 2 : 1)] = place;
    }
  }
  for (const name of ["kinds", "micropacks", "chunks", "starts", "stops", "works", "ofBackward"]) {
    const values = plan[name];
    plan[name] = values.map((_, i) => values[order[i]]);
  }
  plan.longestBeside = 0;
  for (let i = 0; i < count; i++) if (isBeside(plan.kinds[i])) plan.longestBeside = Math.max(plan.longestBeside, plan.stops[i] - plan.starts[i]);
  plan.ends = plan.stops.slice();  // computing that waits for the slower of several ends with it; ends rise
  for (let row = 0; row < plan.rows; row++) {
    for (let i = plan.laneOffsets[2 * row] + 1; i < plan.laneOffsets[2 * row + 1]; i++) plan.ends[i] = Math.max(plan.ends[i], plan.ends[i - 1]);
  }
}

// First task of a lane that reaches past a time. Sends overlap, so there it is the first that may.
function firstOf(plan, lane, time) {
  const low = plan.laneOffsets[lane], high = plan.laneOffsets[lane + 1];
  return lane % 2 ? firstAfter(plan.starts, low, high, time - plan.longestBeside) : firstAfter(plan.ends, low, high, time);
}

// The rows between two heights of a plan, as pixels of the device.
function paintRows(plan, place, image, grid) {
  const { width, height } = image, into = new Uint32Array(image.data.buffer), scale = place.scale;
  into.fill(0);
  const blank = new Uint32Array(width), one = new Uint32Array(width), strip = new Uint32Array(width);
  for (const x of grid) if (x >= 0 && x < width) blank[x] = paints.grid;
  for (let y = 0; y < height; y++) into.set(blank, y * width);
  const perS = width / (view.to - view.from);
  const low = Math.max(0, Math.round(-view.from * perS)), end = Math.min(width, Math.round((plan.makespan - view.from) * perS));
  const [firstRow, lastRow] = place.rows;
  for (let row = firstRow; row < lastRow; row++) {
    const top = Math.round((place.top(row) - place.from) * scale), tall = Math.max(1, Math.round(place.tall * scale));
    const bottom = top + tall + Math.round(place.strip * scale);
    one.set(blank);
    if (end > low) one.fill(paints.idle, low, end);
    strip.set(one);
    const marks = [];
    paintComputing(plan, row, one, strip, perS, marks);
    paintBeside(plan, row, strip, perS);
    for (let y = Math.max(top, 0); y < Math.min(bottom, height); y++) into.set(y < top + tall ? one : strip, y * width);
    for (const mark of marks) paintMark(into, width, height, top, tall, mark);
  }
}

// What is narrower than a pixel is painted once for the pixel, and the next one is the first that reaches past it.
function paintComputing(plan, row, line, strip, perS, marks) {
  const width = line.length, last = plan.laneOffsets[2 * row + 1];
  let covered = 0, i = firstOf(plan, 2 * row, view.from);
  while (i < last && plan.starts[i] < view.to && covered < width) {
    const from = (plan.starts[i] - view.from) * perS, to = (plan.stops[i] - view.from) * perS;
    let left = Math.max(Math.round(from), covered), right = Math.min(Math.round(to), width);
    if (right <= left) {
      left = Math.max(Math.floor(from), covered);
      if (left < width) line[left] = paintOf(plan.kinds[i], plan.firsts[i])[0];
      covered = left + 1;
      i = firstAfter(plan.ends, i + 1, last, view.from + covered / perS);
      continue;
    }
    if (plan.kinds[i] > WEIGHT) {
      line.fill(paints.kinds[plan.kinds[i]], left, right);
      strip.fill(paints.kinds[plan.kinds[i]], left, right);
    } else paintTask(plan, i, from, to, left, right, line, marks);
    covered = right;
    i++;
  }
}

function paintTask(plan, task, from, to, left, right, line, marks) {
  const kind = plan.kinds[task], pass = passOf(plan, task), pack = plan.micropacks[task];
  const first = pass.offsets[pack], last = pass.offsets[pack + 1];
  if (first === last) { marks.push([left, right, paints.kinds[kind], true]); return; }
  const share = plan.works[task] / (plan.stops[task] - plan.starts[task]);
  let worked = right;
  if (share < 0.995) {
    worked = Math.min(right, Math.max(Math.round(from + (to - from) * share), left));
    if (worked < right) marks.push([worked, right, paints.shades[kind][SHADES - 1][0], false]);
  }
  if (last - first === 1 || worked - left < 3) line.fill(paintOf(kind, pass.documents[first])[0], left, Math.max(worked, left + 1));
  else paintSlices(pass, kind, first, last, from, (to - from) * share, left, worked, line);
  if (worked - left > 4) line[worked - 1] = paintOf(kind, pass.documents[last - 1])[1];  // where the next task begins
}

// As wide as their share of the tokens.
function paintSlices(pass, kind, first, last, from, wide, left, worked, line) {
  for (let j = first, done = left; j < last && done < worked; j++) {
    const stop = j + 1 < last ? Math.min(Math.round(from + pass.shares[j + 1] * wide), worked) : worked;
    if (stop <= done) continue;
    const [shade, edge] = paintOf(kind, pass.documents[j]);
    line.fill(shade, done, stop);
    if (j > first && stop - done > 4) line[done] = edge;
    done = stop;
  }
}

function paintBeside(plan, row, strip, perS) {
  const width = strip.length, last = plan.laneOffsets[2 * row + 2];
  for (let i = firstOf(plan, 2 * row + 1, view.from); i < last && plan.starts[i] < view.to; i++) {
    const left = Math.max(Math.floor((plan.starts[i] - view.from) * perS), 0);
    const right = Math.min(Math.max(Math.round((plan.starts[i] + plan.works[i] - view.from) * perS), left + 1), width);
    if (right > left) strip.fill(paints.kinds[plan.kinds[i]], left, right);
  }
}

// A line through the middle where a task waits for others, or the outline of one that is empty.
function paintMark(into, width, height, top, tall, [left, right, colour, isOutline]) {
  if (right <= left) return;
  const fill = (y) => { if (y >= 0 && y < height) into.fill(colour, y * width + left, y * width + right); };
  if (!isOutline) { fill(top + (tall >> 1)); return; }
  fill(top);
  fill(top + tall - 1);
  for (let y = Math.max(top, 0); y < Math.min(top + tall, height); y++) into[y * width + left] = into[y * width + right - 1] = colour;
}

// Memory of all stages: how many curves pass a pixel decides how dark it is, as if they were drawn over each other.
function paintMemory(plan, image, most, alpha) {
  const { width, height } = image, counts = new Uint16Array(width * height), into = new Uint32Array(image.data.buffer);
  for (let row = 0; row < plan.rows; row++) countCurve(plan, row, counts, width, height, most);
  const shades = Array.from({ length: 64 }, (_, count) => pixelOf(colours.quiet, Math.round(255 * (1 - (1 - alpha) ** count))));
  shades[0] = 0;
  for (let i = 0; i < counts.length; i++) into[i] = shades[Math.min(counts[i], 63)];
}

function countCurve(plan, row, counts, width, height, most) {
  const low = plan.memoryOffsets[row], high = plan.memoryOffsets[row + 1], perS = width / (view.to - view.from);
  if (low === high) return;
  const up = (value) => Math.min(Math.max(Math.round(height - 1 - value / most * (height - 1)), 0), height - 1);
  const end = Math.min(width, Math.round((plan.makespan - view.from) * perS));
  let i = Math.max(low, firstAfter(plan.memoryTimes, low, high, view.from) - 1);
  let now = up(plan.memoryBytes[i]), x = Math.max(Math.round((plan.memoryTimes[i] - view.from) * perS), 0);
  for (i += 1; x < end;) {
    const next = i < high ? Math.min(Math.max(Math.round((plan.memoryTimes[i] - view.from) * perS), x), end) : end;
    for (; x < next; x++) counts[now * width + x]++;
    if (x >= end) return;
    let least = now, greatest = now;
    for (; i < high && (plan.memoryTimes[i] - view.from) * perS < x + 0.5; i++) {
      now = up(plan.memoryBytes[i]);
      if (now < least) least = now;
      if (now > greatest) greatest = now;
    }
    for (let y = least; y <= greatest; y++) counts[y * width + x]++;
    x++;
  }
}
