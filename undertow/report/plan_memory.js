// Bytes that each rank holds, moment by moment, over the same part of the iteration.
const held = document.getElementById("held"), limit = data.limit_bytes, heldHeight = ranks.length > 8 ? 44 : 72;
const ceiling = data.top_bytes; // above the limit, unless that is far off

for (const rank of ranks) {
  const times = [0], sizes = [rank.static_bytes];
  const add = (time, change) => { if (change) { times.push(time); sizes.push(sizes[sizes.length - 1] + change); } };
  for (let i = 0; i < rank.start.length; i++) {
    const [, begins, ends] = stageOf(rank, i)[rank.kinds[i]];
    add(rank.start[i], begins);
    add(rank.end[i], ends);
  }
  rank.times = Float64Array.from(times);
  rank.sizes = Float64Array.from(sizes);
}

function drawHeld(pen, plot) {
  axis(pen, plot, ranks.length * heldHeight);
  ranks.forEach((rank, row) => {
    const bottom = (row + 1) * heldHeight - 4, high = heldHeight - 8;
    const y = (size) => bottom - (size / ceiling) * high;
    pen.fillStyle = plot.color("--idle");
    pen.fillRect(plot.left, bottom - high, plot.width, high);
    const { most, least } = envelope(rank, plot);
    const right = plot.x(Math.min(view.to, whole));
    for (const [values, alpha] of [[most, least ? 0.45 : 1], ...(least ? [[least, 1]] : [])]) {
      Object.assign(pen, { globalAlpha: alpha, fillStyle: plot.color("--F") });
      pen.beginPath();
      pen.moveTo(plot.left, bottom);
      values.forEach(([x, size], n) => { pen.lineTo(x, y(size)); pen.lineTo(values[n + 1]?.[0] ?? right, y(size)); });
      pen.lineTo(right, bottom);
      pen.fill();
    }
    Object.assign(pen, { globalAlpha: 1, fillStyle: plot.color("--still") });
    pen.fillRect(plot.left, y(rank.static_bytes), right - plot.left, bottom - y(rank.static_bytes));
    for (const [color, width] of limit <= ceiling ? [["--paper", 4], ["--limit", 2]] : []) {
      pen.fillStyle = plot.color(color);
      pen.fillRect(plot.left, y(limit) - width / 2, plot.width, width);
    }
  });
  names(pen, plot, heldHeight);
}

// Steps in view, or where they are many, the most and the least of each pixel.
function envelope(rank, plot) {
  const first = Math.max(0, above(rank.times, view.from) - 1), last = above(rank.times, view.to);
  if (last - first <= 2 * plot.width) {
    const step = (_, n) => [Math.max(plot.left, plot.x(rank.times[first + n])), rank.sizes[first + n]];
    return { most: Array.from({ length: last - first }, step), least: null };
  }
  const most = [], least = [];
  for (let column = 0, i = first; column < plot.width; column++) {
    const edge = view.from + ((column + 1) / plot.width) * (view.to - view.from);
    let [low, high] = [rank.sizes[i], rank.sizes[i]];
    for (; i + 1 < last && rank.times[i + 1] <= edge; i++) {
      low = Math.min(low, rank.sizes[i + 1]);
      high = Math.max(high, rank.sizes[i + 1]);
    }
    most.push([plot.left + column, high]);
    least.push([plot.left + column, low]);
  }
  return { most, least };
}

function tellHeld(ticks, y) {
  const row = Math.floor(y / heldHeight), rank = ranks[row];
  if (!rank) return null;
  const size = rank.sizes[above(rank.times, ticks) - 1], free = limit - size;
  return [
    `rank ${row} at ${seconds(ticks)}: ${bytes(size)}`, `of these ${bytes(rank.static_bytes)} throughout`,
    `${bytes(Math.abs(free))} ${free < 0 ? "above" : "below"} the limit`,
  ];
}
charts.push({ canvas: held, draw: drawHeld, tell: tellHeld, height: ranks.length * heldHeight + 24, keys: {} });
