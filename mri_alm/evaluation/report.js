"use strict";
// Every number comes ready from Python (report-data): this file shows, sorts and filters, and computes nothing.
const data = JSON.parse(document.getElementById("report-data").textContent);
const everything = (selector, root = document) => [...root.querySelectorAll(selector)];

// --- Figures ---------------------------------------------------------------------------------------------------------
const options = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage"]],
  toImageButtonOptions: { format: "svg" },
};
const drawn = Promise.all(
  Object.entries(data.figures).map(([id, figure]) => Plotly.newPlot(id, figure.data, figure.layout, options)),
);

function showOnFigures(step) {
  for (const id of ["roc", "roc-high"]) {
    const marker = data.figures[id].layout.meta.marker;
    Plotly.restyle(id, { x: [[step.point[0]]], y: [[step.point[1]]] }, [marker]);
  }
  const line = { "shapes[0].visible": step.at !== null };
  if (step.at !== null) Object.assign(line, { "shapes[0].x0": step.at, "shapes[0].x1": step.at });
  Plotly.relayout("scores", line);
}

// --- Slider ----------------------------------------------------------------------------------------------------------
const slider = document.getElementById("allowed");
let tradeOff = data.trade_offs[0];

function showStep() {
  const step = tradeOff.steps[Number(slider.value)];
  for (const element of everything("[data-step]")) element.textContent = step[element.dataset.step];
  slider.setAttribute("aria-valuetext", step.allowed);
  drawn.then(() => showOnFigures(step));
}

function choose(key) {
  tradeOff = data.trade_offs.find((each) => each.key === key);
  slider.max = tradeOff.steps.length - 1;
  slider.value = tradeOff.start;
  for (const note of everything("[data-basis]")) note.hidden = note.dataset.basis !== key;
  showStep();
}

slider.addEventListener("input", showStep);
for (const radio of everything("[name=basis]")) radio.addEventListener("change", () => choose(radio.value));
document.querySelector("[name=basis]").checked = true; // a browser may remember another choice over a reload
choose(tradeOff.key);

// --- Patients --------------------------------------------------------------------------------------------------------
const body = document.querySelector("#patient-table tbody");
const heads = everything("#patient-table thead th");
const rows = [...body.rows];
const find = document.getElementById("find");
const show = document.getElementById("show");

function valueOf(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
}

function sortBy(column) {
  const up = heads[column].getAttribute("aria-sort") !== "ascending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", up ? "ascending" : "descending");
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  rows.sort((a, b) => (up ? 1 : -1) * compare(valueOf(a, column), valueOf(b, column)));
  body.append(...rows);
}

function filter() {
  const words = find.value.toLowerCase();
  let shown = 0;
  for (const row of rows) {
    const fits = show.value === "warned" ? "warned" in row.dataset : !show.value || row.dataset.outcome === show.value;
    row.hidden = !(fits && row.textContent.toLowerCase().includes(words));
    shown += !row.hidden;
  }
  document.getElementById("count").textContent = `${shown} of ${rows.length} exams`;
}

heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => sortBy(column)));
find.addEventListener("input", filter);
show.addEventListener("change", filter);
filter();

const enlarged = document.getElementById("enlarged");
for (const thumb of everything(".thumb")) {
  thumb.addEventListener("click", () => {
    enlarged.querySelector("img").src = thumb.querySelector("img").src;
    enlarged.querySelector("p").textContent = thumb.closest("tr").cells[0].textContent;
    enlarged.showModal();
  });
}

// --- Paper -----------------------------------------------------------------------------------------------------------
// Figures keep the window's width on paper unless told.
addEventListener("beforeprint", () => {
  for (const each of everything("details")) each.open = true;
  for (const plot of everything(".plot")) Plotly.relayout(plot, { width: plot.closest(".small") ? 330 : 660 });
});
addEventListener("afterprint", () => {
  for (const plot of everything(".plot")) Plotly.relayout(plot, { width: null, autosize: true });
});
