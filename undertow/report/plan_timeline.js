// Operations of every rank. Where they are narrower than a few pixels, a column shows how its time is shared out.
const timeline = document.getElementById("timeline");
const rowHeight = ranks.length > 24 ? 14 : ranks.length > 8 ? 20 : 30;
const COLUMN = 2, NARROW = 3; // pixels: of a column of shares, and of operations that are drawn one by one

function drawTimeline(pen, plot) {
  const height = ranks.length * rowHeight;
  axis(pen, plot, height);
  pen.save();
  pen.beginPath();
  pen.rect(plot.left, 0, plot.width, height);
  pen.clip();
  ranks.forEach((rank, row) => {
    const top = row * rowHeight + 1, first = above(rank.end, view.from), last = above(rank.start, view.to);
    pen.fillStyle = plot.color("--idle");
    pen.fillRect(plot.left, top, plot.width, rowHeight - 2);
    const end = Math.min(view.to, rank.end[rank.end.length - 1]), span = plot.x(end) - plot.left;
    if (span / Math.max(1, last - first) < NARROW) drawShares(pen, plot, rank, top, first, last);
    else drawOperations(pen, plot, rank, top, first, last);
    const done = rank.end[rank.end.length - 1];
    pen.fillStyle = plot.color("--S");
    pen.fillRect(plot.x(done), top, plot.x(done + rank.step) - plot.x(done), rowHeight - 2);
  });
  drawChosen(pen, plot);
  pen.restore();
  names(pen, plot, rowHeight);
}

function drawShares(pen, plot, rank, top, first, last) {
  const columns = Math.ceil(plot.width / COLUMN);
  const shares = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, new Float32Array(columns)]));
  for (let i = first; i < last; i++) {
    const from = Math.max(0, (plot.x(rank.start[i]) - plot.left) / COLUMN);
    const to = Math.min(columns, (plot.x(rank.end[i]) - plot.left) / COLUMN), into = shares[rank.kinds[i]];
    for (let c = Math.floor(from); c < to; c++) into[c] += Math.min(to, c + 1) - Math.max(from, c);
  }
  const base = new Float32Array(columns).fill(top + rowHeight - 2);
  for (const kind in shares) {
    pen.fillStyle = plot.color(`--${kind}`);
    shares[kind].forEach((share, c) => {
      const height = Math.min(1, share) * (rowHeight - 2);
      base[c] -= height;
      if (height) pen.fillRect(plot.left + c * COLUMN, base[c], COLUMN, height);
    });
  }
}

function drawOperations(pen, plot, rank, top, first, last) {
  const hatch = hatching(pen, plot.color("--mark"));
  Object.assign(pen, { textAlign: "center", textBaseline: "middle" });
  for (let i = first; i < last; i++) {
    const x = plot.x(rank.start[i]), kind = rank.kinds[i], stage = stageOf(rank, i);
    const width = plot.x(rank.end[i]) - x, gap = width > 4 ? 1 : 0;
    pen.globalAlpha = 1 - (0.4 * chunkOf(rank, i)) / Math.max(1, data.chunks - 1);
    pen.fillStyle = plot.color(`--${kind}`);
    pen.fillRect(x, top, width - gap, rowHeight - 2);
    pen.globalAlpha = 1;
    if (kind === "B" && stage.recomputed && width > 6) {
      pen.fillStyle = hatch;
      pen.fillRect(x, top, (width * stage.recomputed) / stage.B[0], rowHeight - 2);
    }
    const left = Math.max(x, plot.left), seen = Math.min(x + width, plot.left + plot.width) - left;
    const text = `${seen > 60 ? `${kind} ` : ""}${rank.microbatch[i]}`;
    if (seen > 7 * text.length + 6) {
      pen.fillStyle = plot.color("--on");
      pen.fillText(text, left + seen / 2, top + rowHeight / 2 - 1);
    }
  }
}

function hatching(pen, color) {
  const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 }), small = tile.getContext("2d");
  Object.assign(small, { strokeStyle: color, lineWidth: 1.2 });
  small.beginPath();
  for (const shift of [-6, 0, 6]) { small.moveTo(shift, 6); small.lineTo(shift + 6, 0); }
  small.stroke();
  return pen.createPattern(tile, "repeat");
}

function drawChosen(pen, plot) {
  const rank = ranks[view.rank], i = view.index, x = i < 0 ? 0 : plot.x(rank.start[i]);
  if (i < 0) return;
  Object.assign(pen, { strokeStyle: plot.color("--ink"), lineWidth: 2 });
  pen.strokeRect(x, view.rank * rowHeight + 1, Math.max(2, plot.x(rank.end[i]) - x), rowHeight - 2);
}

function described(rank, i) {
  const chunk = data.chunks > 1 ? `, chunk ${chunkOf(rank, i)}` : "", kind = rank.kinds[i], stage = stageOf(rank, i);
  const lines = [
    `${KINDS[kind]} of microbatch ${rank.microbatch[i]}`,
    `rank ${ranks.indexOf(rank)}, stage ${rank.stages[chunkOf(rank, i)]}${chunk}`,
    lasting(rank.start[i], rank.end[i]),
  ];
  if (kind === "B" && stage.recomputed) lines.push(`of these ${milliseconds(stage.recomputed)} compute forward again`);
  return lines;
}

function tellOperation(ticks, y) {
  const row = Math.floor(y / rowHeight), rank = ranks[row];
  if (!rank) return null;
  const i = above(rank.end, ticks);
  if (i < rank.start.length && rank.start[i] <= ticks) return described(rank, i);
  const before = i ? rank.end[i - 1] : 0, last = i === rank.start.length ? before + rank.step : before;
  if (ticks < last) return [`rank ${row}, once an iteration: sums of gradients, gathers of weights`, lasting(before, last)];
  return [`rank ${row} waits`, lasting(last, rank.start[i] ?? whole)];
}

function choose(row, index) {
  const rank = ranks[(view.rank = Math.min(ranks.length - 1, Math.max(0, row)))];
  const i = Math.min(rank.start.length - 1, Math.max(0, index)), [start, end] = [rank.start[i], rank.end[i]];
  if (start < view.from || end > view.to) {
    const span = Math.max(view.to - view.from, 1.2 * (end - start));
    show((start + end - span) / 2, (start + end + span) / 2);
  }
  view.index = i;
  const lines = described(rank, i), box = timeline.getBoundingClientRect();
  const share = Math.max(0, start - view.from) / (view.to - view.from);
  showTip(lines, box.left + GUTTER + share * (box.width - GUTTER), box.top + (view.rank + 1) * rowHeight - 12);
  document.getElementById("chosen").textContent = lines.join(", ");
  redraw();
}

// From nothing chosen, the first operation that is in view.
const next = (by) => choose(view.rank, view.index < 0 ? above(ranks[view.rank].end, view.from) : view.index + by);
function across(by) {
  const middle = view.index < 0 ? view.from : (ranks[view.rank].start[view.index] + ranks[view.rank].end[view.index]) / 2;
  const row = Math.min(ranks.length - 1, Math.max(0, view.rank + (view.index < 0 ? 0 : by)));
  choose(row, above(ranks[row].end, middle));
}
charts.push({
  canvas: timeline, draw: drawTimeline, tell: tellOperation, height: ranks.length * rowHeight + 24,
  keys: {
    ",": () => next(-1), ".": () => next(1), ArrowUp: () => across(-1), ArrowDown: () => across(1),
    Escape: () => timeline.blur(),
  },
});
