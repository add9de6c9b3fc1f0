"use strict";
// Every number comes ready from Python (report-data): this file shows, sorts and filters. It compares scores with the
// slider's threshold, and computes nothing else.
const data = JSON.parse(document.getElementById("report-data").textContent);
const everything = (selector, root = document) => [...root.querySelectorAll(selector)];

function made(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// --- Figures ---------------------------------------------------------------------------------------------------------
const options = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage"]],
  toImageButtonOptions: { format: "svg" },
};
const darkly = { // colours of figures.py that a dark page replaces
  "#222222": "#e6e6e6", "#FFFFFF": "#15181c", "#E3E3E3": "#333a42", "#767676": "#9aa3ad", "#0072B2": "#4ca7e0",
};
const dark = matchMedia("(prefers-color-scheme: dark)");
let drawn = Promise.resolve();

function coloured(figure, isDark) {
  const text = JSON.stringify(figure);
  return JSON.parse(text, (key, value) => (isDark && key.endsWith("color") && darkly[value]) || value);
}

function draw(isDark) {
  const figures = Object.entries(data.figures).map(([id, figure]) => [id, coloured(figure, isDark)]);
  drawn = Promise.all(figures.map(([id, { data, layout }]) => Plotly.react(id, data, layout, options)));
}

function showOnFigures(step) {
  for (const [id, { layout }] of Object.entries(data.figures)) {
    const { marker, line } = layout.meta;
    if (marker !== undefined) Plotly.restyle(id, { x: [[step.point[0]]], y: [[step.point[1]]] }, [marker]);
    if (line === undefined) continue;
    const moved = { [`shapes[${line}].visible`]: step.at !== null };
    if (step.at !== null) Object.assign(moved, { [`shapes[${line}].x0`]: step.at, [`shapes[${line}].x1`]: step.at });
    Plotly.relayout(id, moved);
  }
}

draw(dark.matches);
dark.addEventListener("change", () => {
  draw(dark.matches);
  showStep();
});

// --- Slider ----------------------------------------------------------------------------------------------------------
const slider = document.getElementById("allowed");
let tradeOff = data.trade_offs[0];

function showStep() {
  const step = tradeOff.steps[Number(slider.value)];
  for (const element of everything("[data-step]")) element.textContent = step[element.dataset.step];
  slider.setAttribute("aria-valuetext", step.allowed);
  drawn.then(() => showOnFigures(step));
  decide(step);
}

function choose(key) {
  tradeOff = data.trade_offs.find((each) => each.key === key);
  slider.max = tradeOff.steps.length - 1;
  slider.value = tradeOff.start;
  for (const note of everything("[data-basis]")) note.hidden = note.dataset.basis !== key;
  showStep();
}

// --- Patients --------------------------------------------------------------------------------------------------------
const body = document.querySelector("#patient-table tbody");
const heads = everything("#patient-table thead th");
const rows = [...body.rows];
const [STUDY, LABEL, SCORE, SPREAD] = [0, 1, 2, heads.length - 5];
const [DECISION, OUTCOME] = [SPREAD + 1, SPREAD + 2];
const find = document.getElementById("find");
const show = document.getElementById("show");
const decisions = document.getElementById("decisions");
const OUTCOMES = { examined: [1, 1], needless: [0, 1], missed: [1, 0], spared: [0, 0] }; // label, decision
const SHOWN = 8; // exams of a gallery

function valueOf(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
}

function atThreshold(row, at) {
  const needed = Number(at === null || valueOf(row, SCORE) >= at);
  const label = valueOf(row, LABEL);
  return Object.keys(OUTCOMES).find((word) => OUTCOMES[word][0] === label && OUTCOMES[word][1] === needed);
}

function decide(step) {
  const found = { missed: [], needless: [] };
  for (const row of rows) {
    const here = atThreshold(row, step.at);
    if (here in found) found[here].push(row);
    const outcome = decisions.value === "file" ? row.dataset.file : here;
    if (row.dataset.outcome === outcome && row.cells[OUTCOME].textContent === outcome) continue;
    row.dataset.outcome = outcome;
    const needed = outcome in OUTCOMES && OUTCOMES[outcome][1];
    row.cells[DECISION].textContent = needed ? "DCE needed" : outcome in OUTCOMES ? "DCE not needed" : "–";
    row.cells[OUTCOME].replaceChildren(made("span", { className: `outcome ${outcome}`, textContent: outcome }));
  }
  for (const place of everything("[data-gallery]")) showGallery(place, found[place.dataset.gallery]);
  filter();
}

function showGallery(place, found) {
  const worst = Number(place.dataset.first);
  found.sort((a, b) => worst * (valueOf(b, SCORE) - valueOf(a, SCORE)));
  place.replaceChildren(...found.slice(0, SHOWN).map(card));
  if (!found.length) place.append(made("p", { textContent: "none" }));
  if (found.length > SHOWN) {
    const order = worst < 0 ? "lowest" : "highest";
    place.append(made("p", { textContent: `The ${SHOWN} of ${order} score; ${found.length - SHOWN} more in the table.` }));
  }
}

function card(row) {
  const texts = { score: row.cells[SCORE].textContent, spread: row.cells[SPREAD].textContent };
  const warnings = row.cells[OUTCOME + 1].textContent;
  const link = made("a", { href: `#${row.id}`, textContent: row.cells[STUDY].textContent });
  link.addEventListener("click", () => reveal(""));
  const said = `score ${texts.score}` + (texts.spread === "–" ? "" : `, spread ${texts.spread}`);
  const caption = made("figcaption", {}, link, made("br"), said);
  if (warnings) caption.append(made("br"), made("small", { textContent: warnings }));
  const picture = row.querySelector(".thumb img");
  if (!picture) return made("figure", {}, caption, made("small", { textContent: "no picture" }));
  const thumb = made("button", { type: "button", className: "thumb" }, made("img", { src: picture.src, alt: "" }));
  thumb.setAttribute("aria-label", `Enlarge the picture of ${link.textContent}`);
  thumb.addEventListener("click", () => enlarge(picture, link.textContent));
  return made("figure", {}, caption, thumb);
}

function reveal(outcome) {
  find.value = "";
  show.value = outcome;
  filter();
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
decisions.addEventListener("change", showStep);
for (const button of everything("[data-show]")) {
  button.addEventListener("click", () => {
    decisions.value = "slider";
    showStep();
    reveal(button.dataset.show);
    document.getElementById("patients").scrollIntoView();
  });
}

const enlarged = document.getElementById("enlarged");
function enlarge(picture, name) {
  enlarged.querySelector("img").src = picture.src;
  enlarged.querySelector("p").textContent = name;
  enlarged.showModal();
}
for (const thumb of everything("table .thumb")) {
  const row = thumb.closest("tr");
  thumb.addEventListener("click", () => enlarge(thumb.querySelector("img"), row.cells[STUDY].textContent));
}

for (const link of everything("a[href='#bound']")) {
  link.addEventListener("click", () => (document.getElementById("bound").open = true));
}
slider.addEventListener("input", showStep);
for (const radio of everything("[name=basis]")) radio.addEventListener("change", () => choose(radio.value));
document.querySelector("[name=basis]").checked = true; // a browser may remember other choices over a reload
decisions.value = "slider";
choose(tradeOff.key);

// --- Paper -----------------------------------------------------------------------------------------------------------
// Figures keep the window's width and its colours on paper unless told.
addEventListener("beforeprint", () => {
  for (const each of everything("details")) each.open = true;
  if (dark.matches) draw(false);
  showStep();
  for (const plot of everything(".plot")) Plotly.relayout(plot, { width: plot.closest(".small") ? 330 : 660 });
});
addEventListener("afterprint", () => {
  for (const plot of everything(".plot")) Plotly.relayout(plot, { width: null, autosize: true });
  if (dark.matches) draw(true);
  showStep();
});
