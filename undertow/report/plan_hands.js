// Wheel, pointers and keys of a chart with time across.
function attach(chart) {
  const { canvas } = chart, down = new Map();
  const place = (event) => {
    const box = canvas.getBoundingClientRect(), width = box.width - GUTTER - 1;
    const share = Math.min(1, Math.max(0, (event.clientX - box.left - GUTTER) / width));
    return { x: event.clientX, y: event.clientY - box.top, width, ticks: view.from + share * (view.to - view.from) };
  };
  const tell = (event) => {
    const at = place(event), lines = chart.tell(at.ticks, at.y);
    view.cursor = at.ticks;
    if (lines) showTip(lines, event.clientX, event.clientY); else hideTip();
    redraw();
  };
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // A page of charts has to scroll: the wheel is a chart's once it was clicked, a pinch always.
    if (!sideways && !event.ctrlKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const amount = ((sideways && event.deltaX) || event.deltaY) * (event.deltaMode ? 16 : 1);
    if (sideways) pan(amount / 800);
    else zoom(Math.exp(-amount / (event.ctrlKey ? 120 : 360)), place(event).ticks);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, place(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (!before) return tell(event);
    const now = place(event), other = [...down].find(([id]) => id !== event.pointerId)?.[1];
    down.set(event.pointerId, { ...now, ticks: before.ticks }); // what lies under a finger stays there
    if (other) zoom(Math.max(8, Math.abs(now.x - other.x)) / Math.max(8, Math.abs(before.x - other.x)), other.ticks);
    else pan((before.x - now.x) / now.width);
  });
  canvas.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
  canvas.addEventListener("pointerup", (event) => {
    if (down.delete(event.pointerId) && event.pointerType !== "mouse") tell(event); // a finger does not hover
  });
  canvas.addEventListener("pointerleave", () => { view.cursor = null; hideTip(); redraw(); });
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 0.25 : 4, place(event).ticks));
  canvas.addEventListener("blur", () => { view.index = -1; hideTip(); redraw(); });
  canvas.addEventListener("keydown", (event) => {
    const act = { ...MOVES, ...chart.keys }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

const MOVES = {
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5),
  PageUp: () => pan(-0.9), PageDown: () => pan(0.9), 0: reset, Home: reset,
};
for (const button of document.querySelectorAll("[data-move]")) {
  button.addEventListener("click", () => MOVES[button.dataset.move]());
}
