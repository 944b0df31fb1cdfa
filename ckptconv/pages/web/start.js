/* The rest: copying, printing, the size of the window, and the first drawing. */

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", () => {
    const code = button.parentElement.querySelector("code");
    const done = () => {
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    };
    const select = () => {
      getSelection().selectAllChildren(code);
      if (document.execCommand("copy")) done();
    };
    if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(done, select);
    else select();
  });
}

for (const [event, isPrinting] of [["beforeprint", true], ["afterprint", false]]) {
  window.addEventListener(event, () => { printing = isPrinting; drawHead(); drawRows(); });
}
let width = 0, resizing = 0;
new ResizeObserver(() => {
  if (grid.clientWidth === width || printing) return;
  width = grid.clientWidth;
  clearTimeout(resizing);
  resizing = setTimeout(() => { drawHead(); drawRows(); drawMaps(); }, 80);
}).observe(grid);

if (isPair) { state.sort = columns[1]; state.falling = true; }
width = grid.clientWidth;
drawHead();
recolor();
choose();
document.documentElement.dataset.ready = "yes";
