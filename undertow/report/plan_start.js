// Charts come alive; without this file their still pictures stay.
for (const chart of charts) {
  chart.canvas.style.height = `${chart.height}px`;
  chart.canvas.closest(".chart").classList.add("live");
  attach(chart);
  new ResizeObserver(redraw).observe(chart.canvas);
}
for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
for (const [name, paper] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => { document.documentElement.classList.toggle("paper", paper); hideTip(); drawNow(); });
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected"; // works for a page opened as a file
  });
}
redraw();
