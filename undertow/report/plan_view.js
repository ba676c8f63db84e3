// The part of the iteration that is shown, shared by all charts that have time across, and how it is moved.
const data = JSON.parse(document.getElementById("tracks").textContent);
const KINDS = { F: "forward", B: "backward", W: "weight gradients" };
const GUTTER = 44; // pixels for the names of ranks
const GB = 1e9, GIB = 2 ** 30;
const whole = data.seconds / data.tick;
const view = { from: 0, to: whole, cursor: null, rank: 0, index: -1 };
const charts = [];

const chunkOf = (rank, i) => (rank.chunks ? rank.chunks.charCodeAt(i) - 48 : 0);
const stageOf = (rank, i) => data.stages[rank.stages[chunkOf(rank, i)]];
const ranks = data.ranks.map((rank) => {
  const size = rank.kinds.length;
  const [start, end, microbatch, last] = [new Float64Array(size), new Float64Array(size), new Int32Array(size), {}];
  for (let i = 0, now = 0; i < size; i++) {
    const chunk = chunkOf(rank, i), key = rank.kinds[i] + chunk;
    microbatch[i] = last[key] = (last[key] ?? -1) + (rank.steps[i] ?? 1);
    start[i] = now += rank.gaps[i];
    end[i] = now += rank.lasts[i] ?? data.stages[rank.stages[chunk]][rank.kinds[i]][0];
  }
  return { ...rank, start, end, microbatch };
});
const lengths = data.stages.flatMap((stage) => Object.keys(KINDS).map((kind) => stage[kind]?.[0]));
const shortest = Math.min(...lengths.filter(Boolean));

const seconds = (ticks) => `${(ticks * data.tick).toFixed(4)} s`;
const milliseconds = (ticks) => `${Number((ticks * data.tick * 1e3).toPrecision(4))} ms`;
const lasting = (from, to) => `${seconds(from)} to ${seconds(to)}: ${milliseconds(to - from)}`;
const bytes = (size) => `${(size / GB).toFixed(1)} GB (${(size / GIB).toFixed(1)} GiB)`;

// The first of sorted numbers that is above a value.
function above(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

let waiting = 0;
function redraw() {
  waiting ||= requestAnimationFrame(() => { waiting = 0; drawNow(); });
}

function drawNow() {
  for (const chart of charts) {
    const { canvas } = chart, ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (width <= 2 * GUTTER) continue; // not laid out
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) }); // clears it, too
    const pen = canvas.getContext("2d"), style = getComputedStyle(canvas);
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const plot = { left: GUTTER, width: width - GUTTER - 1, height, color: (name) => style.getPropertyValue(name).trim() };
    plot.x = (ticks) => plot.left + ((ticks - view.from) / (view.to - view.from)) * plot.width;
    chart.draw(pen, plot);
  }
}

function show(from, to) {
  const span = Math.min(whole, Math.max(to - from, Math.min(whole, shortest / 4)));
  view.from = Math.min(Math.max(0, (from + to - span) / 2), whole - span);
  view.to = view.from + span;
  hideTip();
  redraw();
}
function zoom(factor, at = (view.from + view.to) / 2) {
  show(at - (at - view.from) / factor, at + (view.to - at) / factor);
}
const pan = (share) => {
  const by = share * (view.to - view.from), held = Math.min(Math.max(by, -view.from), whole - view.to);
  show(view.from + held, view.to + held);
};
const reset = () => show(0, whole);

function axis(pen, plot, top) {
  const rough = ((view.to - view.from) * data.tick * 90) / plot.width, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  pen.textBaseline = "top";
  for (let n = Math.ceil((view.from * data.tick) / step - 1e-9); n * step <= view.to * data.tick * (1 + 1e-12); n++) {
    const x = plot.x((n * step) / data.tick), text = `${(n * step).toFixed(digits)} s`;
    pen.fillStyle = plot.color("--faint");
    pen.fillRect(x, 0, 1, top);
    pen.fillStyle = plot.color("--ink");
    pen.textAlign = x > plot.left + plot.width - 24 ? "right" : n ? "center" : "left";
    pen.fillText(text, x, top + 5);
  }
}

function names(pen, plot, each) {
  Object.assign(pen, { fillStyle: plot.color("--ink"), textAlign: "right", textBaseline: "middle" });
  ranks.forEach((_, row) => pen.fillText(`${row}`, plot.left - 8, (row + 0.5) * each));
  if (view.cursor !== null) pen.fillRect(plot.x(view.cursor), 0, 1, ranks.length * each);
}

const tip = document.getElementById("tip");
function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(x + 12, window.innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > window.innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };
