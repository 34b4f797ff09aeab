// Shows the selected step in the picture of the graph, which can be larger than its frame: else the
// step that failed, else a running step, else the first step.

function findStep() {
  const failed = document.querySelectorAll(".graph .failed, .graph .error");
  return (
    document.querySelector(".graph .selected") ??
    failed[failed.length - 1] ??
    document.querySelector(".graph .running:not(.opened)") ??
    document.querySelector(".graph .node")
  );
}

function showStep() {
  const step = findStep();
  const frame = document.querySelector(".graph-scroll");
  if (!step || !frame) return;
  const box = step.getBoundingClientRect();
  const area = frame.getBoundingClientRect();
  frame.scrollLeft += box.left + box.width / 2 - (area.left + area.width / 2);
  frame.scrollTop += box.top + box.height / 2 - (area.top + area.height / 2);
}

showStep();
