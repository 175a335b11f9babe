// Pointing at tasks, zooming, panning, and the page's buttons.
// --- pointing ---
function taskAt(plan, x, y) {
  const place = layout(plan);
  if (x < GUTTER || x > place.width - RIGHT || y < AXIS || y > place.lanes) return null;
  for (let row = 0; row < plan.rows; row++) {
    const top = place.top(row);
    if (y < top || y >= top + place.height) continue;
    const inStrip = y - top >= place.height - 1 - place.strip;
    const time = timeAt(x, place.width), slack = 2 * (view.to - view.from) / (place.width - GUTTER - RIGHT);
    let best = -1, distance = Infinity;
    for (const lane of [2 * row, 2 * row + 1]) {
      for (let i = firstOf(plan, lane, time - slack); i < plan.laneOffsets[lane + 1] && plan.starts[i] <= time + slack; i++) {
        const away = Math.max(plan.starts[i] - time, time - plan.stops[i], 0) + (isBeside(plan.kinds[i]) === inStrip ? 0 : slack);
        if (away < distance && away <= 2 * slack) { best = i; distance = away; }
      }
    }
    return { plan, row, task: best, document: best < 0 ? -1 : documentAt(plan, best, time) };
  }
  return null;
}

function documentAt(plan, task, time) {
  const kind = plan.kinds[task], pack = plan.micropacks[task];
  if (kind > WEIGHT || pack < 0) return -1;
  const pass = passOf(plan, task), share = (time - plan.starts[task]) / (plan.stops[task] - plan.starts[task]);
  const done = share * (plan.stops[task] - plan.starts[task]) / Math.max(plan.works[task], 1e-12);
  for (let j = pass.offsets[pack]; j < pass.offsets[pack + 1]; j++) if (done < endShare(pass, pack, j)) return pass.documents[j];
  return pass.offsets[pack] < pass.offsets[pack + 1] ? pass.documents[pass.offsets[pack + 1] - 1] : -1;
}

const line = (words, kind = "") => {
  const made = document.createElement("div");
  made.textContent = words;
  made.className = kind;
  return made;
};

function say(found) {
  const { plan, task, row } = found, kind = plan.kinds[task], pack = plan.micropacks[task], lines = [];
  const rank = plan.ranks[Math.floor(row / plan.pp)];
  const chunk = plan.pp < plan.numChunks && kind !== SYNC ? `, chunk ${plan.chunks[task]}` : "";
  lines.push(line(`${NAMES[kind]}, rank ${rank}, stage ${row % plan.pp}${chunk}`, "head"));
  const stop = isBeside(kind) ? plan.starts[task] + plan.works[task] : plan.stops[task];
  lines.push(line(`${seconds(stop - plan.starts[task])}, from ${seconds(plan.starts[task], 6)} to ${seconds(stop, 6)}`));
  const waits = plan.stops[task] - plan.starts[task] - plan.works[task];
  if (kind <= WEIGHT && waits > 0.005 * plan.works[task]) lines.push(line(`${seconds(waits)} of it waits for the ranks that share it`));
  if (pack >= 0) {
    const pass = passOf(plan, task), first = pass.offsets[pack], last = pass.offsets[pack + 1];
    let tokens = 0;
    for (let j = first; j < last; j++) tokens += pass.stops[j] - pass.starts[j];
    const number = pack - pass.rankOffsets[Math.floor(row / plan.pp)];
    const held = last === first ? "empty" : `${thousands(tokens)} tokens in ${last - first === 1 ? "one slice" : `${last - first} slices`}`;
    lines.push(line(`MicroPack ${number}: ${held}`));
    let order = Array.from({ length: last - first }, (_, k) => first + k);
    order.sort((a, b) => (pass.documents[b] === found.document) - (pass.documents[a] === found.document));
    for (const j of order.slice(0, 7)) lines.push(line(sliceWords(plan, pass, j), pass.documents[j] === found.document ? "own" : "slice"));
    if (order.length > 7) lines.push(line(`and ${order.length - 7} more`, "slice"));
  }
  tip.replaceChildren(...lines);
}

function sliceWords(plan, pass, j) {
  const id = pass.documents[j], length = plan.lengths[id], whole = pass.starts[j] === 0 && pass.stops[j] === length;
  const shared = plan.sharers[id] > 1 ? `, shared by ${plan.sharers[id]} ranks` : "";
  return `document ${thousands(id)}: ${whole ? `whole, ${thousands(length)}` : `${thousands(pass.starts[j])} to ${thousands(pass.stops[j])} of ${thousands(length)}`}${shared}`;
}

function point(plan, event) {
  const box = plan.box.getBoundingClientRect();
  pointed = taskAt(plan, event.clientX - box.left, event.clientY - box.top);
  const is = pointed && pointed.task >= 0;
  tip.hidden = !is;
  if (is) {
    say(pointed);
    const left = Math.min(event.clientX + 16, window.innerWidth - tip.offsetWidth - 8);
    const above = event.clientY + tip.offsetHeight + 24 > window.innerHeight;
    tip.style.left = `${Math.max(left, 8)}px`;
    tip.style.top = `${above ? event.clientY - tip.offsetHeight - 14 : event.clientY + 18}px`;
  } else if (pointed) pointed = { ...pointed, task: -1, document: -2 };
  redraw();
}

// --- zooming and panning ---
function look(from, to) {
  const least = longest / 1e5, size = Math.min(Math.max(to - from, least), longest * 1.02);
  const start = Math.min(Math.max((from + to - size) / 2, -0.01 * longest), longest * 1.01 - size);
  view.from = start;
  view.to = start + size;
  redraw();
}

// What all shown timelines have of the view: the shortest one would soon be out of sight if its middle were zoomed to.
function middle() {
  const ends = plans.filter((plan) => plan.isShown && plan.makespan > view.from).map((plan) => plan.makespan);
  return (Math.max(view.from, 0) + Math.min(view.to, ...ends)) / 2;
}

function zoom(factor, at = middle()) {
  look(at - (at - view.from) / factor, at + (view.to - at) / factor);
}

const pan = (share) => look(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

function listen(plan) {
  const canvas = plan.box, held = new Map();
  const across = () => canvas.clientWidth - GUTTER - RIGHT;
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways && !event.shiftKey) return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 240), timeAt(event.offsetX, canvas.clientWidth));
    else pan((sideways ? event.deltaX : event.deltaY) / across());
    point(plan, event);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 1 / 3 : 3, timeAt(event.offsetX, canvas.clientWidth)));
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, event.offsetX);
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) { point(plan, event); return; }
    const before = [...held.values()];
    held.set(event.pointerId, event.offsetX);
    const after = [...held.values()];
    if (held.size === 1) pan((before[0] - after[0]) / across());
    else {
      const [one, other] = [Math.abs(before[0] - before[1]), Math.abs(after[0] - after[1])];
      if (one > 4 && other > 4) zoom(other / one, timeAt((after[0] + after[1]) / 2, canvas.clientWidth));
    }
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => {
    held.delete(event.pointerId);
    canvas.classList.remove("held");
  });
  canvas.addEventListener("pointerleave", () => { pointed = null; tip.hidden = true; redraw(); });
  canvas.addEventListener("keydown", (event) => {
    const does = { ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(ZOOM), "=": () => zoom(ZOOM),
      "-": () => zoom(1 / ZOOM), 0: () => look(0, longest) }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  });
}

// --- the page around it ---
function build() {
  for (const plan of plans) {
    const box = document.createElement("div");
    box.className = "lanes";
    box.hidden = !plan.isShown;
    const head = document.createElement("div");
    head.className = "lanes-head";
    const name = document.createElement("b");
    name.textContent = plan.title;
    head.append(name, ` ${plan.note}`);
    plan.box = document.createElement("div");
    plan.box.className = "drawn";
    plan.box.tabIndex = 0;
    plan.box.setAttribute("role", "img");
    plan.box.setAttribute("aria-label", `timeline of ${plan.title}: ${plan.note}`);
    plan.canvas = document.createElement("canvas");
    plan.box.append(plan.canvas);
    box.append(head, plan.box);
    host.append(box);
    listen(plan);
    const toggle = document.querySelector(`[data-plan="${plan.method}"]`);
    toggle.checked = plan.isShown;
    toggle.addEventListener("change", () => {
      plan.isShown = toggle.checked;
      box.hidden = !plan.isShown;
      const was = longest, isWhole = view.from <= 0 && view.to >= was;
      longest = reach();
      look(isWhole ? 0 : view.from, isWhole ? longest : view.to);
    });
  }
  const does = { in: () => zoom(ZOOM), out: () => zoom(1 / ZOOM), whole: () => look(0, longest), left: () => pan(-0.25), right: () => pan(0.25) };
  for (const button of document.querySelectorAll("[data-look]")) button.addEventListener("click", does[button.dataset.look]);
  document.getElementById("by-document").addEventListener("change", (event) => { byDocument = event.target.checked; redraw(); });
  const recolour = () => { readColours(); redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  new ResizeObserver(redraw).observe(host);
  addEventListener("resize", redraw);
  addEventListener("scroll", scrolled, { passive: true });
  for (const name of ["beforeprint", "afterprint"]) addEventListener(name, () => {
    isPrinting = name === "beforeprint";
    for (const plan of plans) if (plan.isShown) draw(plan);
  });
  recolour();
}

build();
