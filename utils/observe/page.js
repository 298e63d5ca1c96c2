// Draws the charts as SVG, so that CSS sets their colours and they print sharply. All charts share one
// range of the x axis (steps, tokens or hours) and one cursor. docs/internals/decisions.md says why this
// uses no chart library.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const view = { axis: "step", range: null, at: null, hidden: new Set(), smooth: 0 };
const AXES = { step: "step", tokens: "tokens seen", hours: "running time" };
const LEFT = 78, RIGHT = 16, TOP = 16, BOTTOM = 44, EDGE = 6; // EDGE: so that points at the edges are whole

function svg(name, attributes, parent) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (parent) parent.append(element);
  return element;
}

function html(name, properties, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// Formats a value, such as 3.142, 0.0003 or 1.25M. Steps have all digits. Hours below 1 are in minutes.
function text(value, kind) {
  if (value === null || value === undefined) return "-";
  if (kind === "step") return Math.round(value).toLocaleString("en");
  if (kind === "hours") return value < 1 ? +(value * 60).toPrecision(3) + " min" : +value.toPrecision(3) + " h";
  const size = Math.abs(value);
  for (const [from, unit, letter] of [[1e12, 1e12, "T"], [1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (size >= from) return +(value / unit).toPrecision(4) + letter;
  }
  return size && size < 1e-4 ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(4));
}

function ticks(low, high, about) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let index = Math.ceil(low / step); index * step <= high * (1 + 1e-12); index++) found.push(index * step);
  return found;
}

// Returns the range of the x axis that contains all points of all charts.
function whole() {
  let low = Infinity, high = -Infinity;
  for (const chart of page.charts) {
    for (const line of chart.lines) {
      for (const at of line[view.axis]) if (at !== null) { low = Math.min(low, at); high = Math.max(high, at); }
    }
  }
  return low < high ? [low, high] : [Math.min(low, 0), high > 0 ? high : 1];
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.log = spec.log;
    this.height = spec.wide ? 340 : 250;
    this.keys = html("div", { className: "keys" });
    this.plot = html("div", { className: "plot", tabIndex: 0 });
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", `${spec.title}: arrows move the cursor, + and - zoom, Esc shows all`);
    const head = html("div", { className: "head" }, html("h3", { textContent: spec.title }),
      html("span", { className: "soft", textContent: spec.note }));
    if (spec.positive) {
      const box = html("input", { type: "checkbox", checked: this.log });
      box.onchange = () => { this.log = box.checked; this.draw(); };
      head.append(html("label", {}, box, " log scale"));
    }
    document.getElementById("charts").append(
      html("figure", { className: spec.wide ? "wide" : "" }, head, this.keys, this.plot));
    for (const line of spec.lines) this.addKey(line);
    this.listen();
  }

  colour(line) {
    return { lost: "var(--lost)", marks: "var(--mark)" }[line.style] || `var(--c${line.colour % 10})`;
  }

  addKey(line) {
    const swatch = html("i", {});
    swatch.style.background = this.colour(line);
    line.shown = html("span", {});
    line.last = html("em", { textContent: "last ", hidden: true });
    const label = line.style === "lost" ? line.note : line.label;
    const key = html("button", { type: "button", title: "show or hide" }, swatch, label + " ", line.last, line.shown);
    const id = line.style + label;
    const mark = () => key.setAttribute("aria-pressed", !view.hidden.has(id));
    line.id = id;
    line.mark = mark;
    mark();
    key.onclick = () => {
      view.hidden.has(id) ? view.hidden.delete(id) : view.hidden.add(id);
      drawAll();
    };
    this.keys.append(key);
  }

  // The part of a series within the range, with a neighbour on each side so that lines reach the edge.
  visible(line) {
    const at = line[view.axis], found = [];
    for (let index = 0; index < at.length; index++) {
      if (at[index] === null) continue;
      const near = (other) => other >= 0 && other < at.length && at[other] >= this.low && at[other] <= this.high;
      if (near(index) || near(index - 1) || near(index + 1)) found.push(index);
    }
    return found;
  }

  draw() {
    const width = Math.max(this.plot.clientWidth, 200);
    [this.low, this.high] = view.range || whole();
    this.width = width;
    this.x = (at) => LEFT + (width - LEFT - RIGHT) * (at - this.low) / (this.high - this.low);
    const lines = this.spec.lines.filter((line) => !view.hidden.has(line.id));
    const parts = lines.map((line) => [line, this.visible(line)]);
    let bottom = Infinity, top = -Infinity;
    for (const [line, indices] of parts) {
      for (const index of indices) {
        if (line.y[index] === null) continue;
        bottom = Math.min(bottom, line.y[index]);
        top = Math.max(top, line.y[index]);
      }
    }
    if (bottom > top) [bottom, top] = [0, 1];
    if (bottom === top) [bottom, top] = [bottom - Math.abs(bottom || 1) * 0.05, top + Math.abs(top || 1) * 0.05];
    const scale = this.log && bottom > 0 ? Math.log10 : (value) => value;
    const pad = (scale(top) - scale(bottom)) * 0.05;
    const span = scale(top) - scale(bottom) + 2 * pad;
    this.y = (value) => this.height - BOTTOM - (this.height - TOP - BOTTOM) * (scale(value) - scale(bottom) + pad) / span;
    const root = svg("svg", { viewBox: `0 0 ${width} ${this.height}`, "aria-hidden": "true" });
    this.drawAxes(root, scale === Math.log10, bottom, top, pad);
    const clip = "clip" + page.charts.indexOf(this.spec);
    svg("rect", { x: LEFT - EDGE, y: 0, width: width - LEFT - RIGHT + 2 * EDGE, height: this.height }, svg("clipPath", { id: clip }, root));
    const inside = svg("g", { "clip-path": `url(#${clip})` }, root);
    for (const [line, indices] of parts) this.drawLine(inside, line, indices);
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: this.height - BOTTOM, visibility: "hidden" }, root);
    this.band = svg("rect", { class: "zoom", y: TOP, height: this.height - TOP - BOTTOM, visibility: "hidden" }, root);
    this.plot.replaceChildren(root);
    for (const line of this.spec.lines) line.mark();
    this.point();
  }

  drawAxes(root, log, bottom, top, pad) {
    const add = (x, y, words, anchor, more) => {
      svg("text", { x, y, "text-anchor": anchor, ...more }, root).textContent = words;
    };
    const middle = (TOP + this.height - BOTTOM) / 2;
    add(0, 0, this.spec.unit, "middle", { class: "label", transform: `translate(12,${middle}) rotate(-90)` });
    add((LEFT + this.width - RIGHT) / 2, this.height - 6, AXES[view.axis], "middle", { class: "label" });
    let levels = ticks(bottom - (log ? 0 : pad), top + (log ? 0 : pad), this.height / 50);
    if (log && top / bottom > 30) {
      const powers = ticks(Math.floor(Math.log10(bottom)), Math.ceil(Math.log10(top)), 4).filter(Number.isInteger);
      levels = powers.map((power) => 10 ** power);
    }
    for (const level of levels) {
      const y = this.y(level);
      if (y < TOP - 6 || y > this.height - BOTTOM + 1) continue;
      svg("path", { class: "grid", d: `M${LEFT},${y}H${this.width - RIGHT}` }, root);
      add(LEFT - 8, y + 4, text(level), "end");
    }
    const unit = view.axis === "hours" && this.high <= 1 ? 60 : 1; // round minutes, not round parts of an hour
    for (const place of ticks(this.low * unit, this.high * unit, Math.max(4, Math.floor(this.width / 90)))) {
      const at = place / unit;
      if (view.axis === "step" && !Number.isInteger(+at.toFixed(6))) continue;
      svg("path", { class: "axis", d: `M${this.x(at)},${this.height - BOTTOM}v4` }, root);
      add(this.x(at), this.height - BOTTOM + 18, text(at, view.axis), "middle");
    }
    svg("path", { class: "axis", d: `M${LEFT},${this.height - BOTTOM}H${this.width - RIGHT}` }, root);
    for (const start of page.marks) {
      const at = start[view.axis];
      if (at === null || at < this.low || at > this.high) continue;
      svg("path", { class: "start", d: `M${this.x(at)},${TOP}V${this.height - BOTTOM}` }, root);
      if (this.spec.wide) add(this.x(at) + 4, TOP + 2, start.label, "start");
    }
  }

  drawLine(root, line, indices) {
    const at = line[view.axis], colour = this.colour(line);
    if (["dots", "marks", "points"].includes(line.style) || indices.length < 2) {
      for (const index of indices) {
        if (line.y[index] === null) continue;
        svg("circle", { cx: this.x(at[index]), cy: this.y(line.y[index]), r: line.style === "marks" ? 4.5 : 3,
          style: line.style === "marks" ? `fill:none;stroke-width:2;stroke:${colour}` : `fill:${colour}` }, root);
      }
    }
    if (line.style === "marks" || line.style === "points") return;
    const draw = (values, style) => {
      let path = "", pen = "M";
      for (const index of indices) {
        if (values[index] === null) { pen = "M"; continue; }
        path += `${pen}${this.x(at[index]).toFixed(1)},${this.y(values[index]).toFixed(1)}`;
        pen = "L";
      }
      if (path) svg("path", { class: `series ${style}`, d: path, style: `stroke:${colour}` }, root);
    };
    const smooth = view.smooth > 0 && line.style === "line";
    draw(line.y, smooth ? "faint" : line.style);
    if (smooth) draw(smoothed(line.y), "line");
  }

  // Moves the cursor. Each name in the legend gets its series' value at the cursor, or the last value.
  point() {
    const at = view.at;
    const seen = at !== null && at >= this.low && at <= this.high;
    this.cursor.setAttribute("visibility", seen ? "visible" : "hidden");
    if (seen) { this.cursor.setAttribute("x1", this.x(at)); this.cursor.setAttribute("x2", this.x(at)); }
    for (const line of this.spec.lines) {
      if (line.style === "lost" || line.style === "marks" || line.style === "faint") continue;
      const index = nearest(line[view.axis], seen ? at : this.high);
      line.shown.textContent = index < 0 ? "" : text(line.y[index]);
      line.last.hidden = seen || index < 0;
    }
  }

  place(event) {
    const box = this.plot.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * this.width - LEFT) / (this.width - LEFT - RIGHT);
    return this.low + Math.min(Math.max(share, 0), 1) * (this.high - this.low);
  }

  listen() {
    let from = null;
    this.plot.onpointerdown = (event) => {
      if (event.button === 0 && event.pointerType !== "touch") { from = this.place(event); this.plot.setPointerCapture(event.pointerId); }
    };
    this.plot.onpointermove = (event) => {
      const at = this.place(event);
      pointAll(at);
      if (from === null) return;
      const [left, right] = [from, at].sort((one, other) => one - other);
      const edges = { visibility: "visible", x: this.x(left), width: this.x(right) - this.x(left) };
      for (const key in edges) this.band.setAttribute(key, edges[key]);
    };
    this.plot.onpointerup = (event) => {
      if (from === null) return;
      const range = [from, this.place(event)].sort((one, other) => one - other);
      from = null;
      this.x(range[1]) - this.x(range[0]) > 5 ? zoom(range) : this.draw();
    };
    this.plot.onpointerleave = () => { if (from === null) pointAll(null); };
    this.plot.ondblclick = () => zoom(null);
    this.plot.onkeydown = (event) => {
      const middle = view.at === null ? (this.low + this.high) / 2 : view.at, half = (this.high - this.low) / 2;
      const step = (this.high - this.low) / 100;
      const act = {
        ArrowLeft: () => pointAll(Math.max(middle - step, this.low)),
        ArrowRight: () => pointAll(Math.min(middle + step, this.high)),
        "+": () => zoom([middle - half / 2, middle + half / 2]),
        "-": () => zoom([middle - half * 2, middle + half * 2]),
      }[event.key === "=" ? "+" : event.key];
      if (act) { act(); event.preventDefault(); }
    };
  }
}

// Returns the exponential moving average of values, with bias correction as in Adam.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * view.smooth + value;
    weight = weight * view.smooth + 1;
    return sum / weight;
  });
}

// Turns each row of a table into a card on narrow screens. Each value gets its column's title.
function makeCards(table) {
  const [head, ...rows] = table.rows;
  if (!head || head.querySelector("td")) return;
  table.classList.add("cards");
  head.classList.add("titles");
  for (const row of rows) {
    for (const cell of row.cells) {
      cell.dataset.title = head.cells[cell.cellIndex].textContent;
      if (!cell.textContent.trim()) cell.classList.add("none");
      cell.replaceChildren(html("span", { className: "cell" }, ...cell.childNodes));
    }
  }
}

// Returns the index of the ascending `places` whose value is nearest to `at`; -1 without values.
function nearest(places, at) {
  let low = 0, high = places.length - 1;
  if (high < 0 || places[high] === null) return -1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < at) low = middle; else high = middle;
  }
  return at - places[low] < places[high] - at ? low : high;
}

function zoom(range) {
  const [low, high] = whole();
  view.range = range && [Math.max(range[0], low), Math.min(range[1], high)];
  if (view.range && view.range[0] <= low && view.range[1] >= high) view.range = null;
  document.getElementById("reset").disabled = !view.range;
  drawAll();
}

function pointAll(at) {
  view.at = at;
  document.getElementById("place").textContent = at === null ? "" : `${{ step: "step", tokens: "tokens", hours: "" }[view.axis]} ${text(at, view.axis)}`;
  for (const chart of charts) chart.point();
}

function drawAll() {
  for (const chart of charts) chart.draw();
}

const charts = page.charts.map((spec) => new Chart(spec));
for (const button of document.querySelectorAll("input[name=axis]")) {
  button.disabled = !page.charts.some((chart) => chart.lines.some((line) => line[button.value].some((at) => at !== null)));
  button.onchange = () => { view.axis = button.value; view.at = null; zoom(null); };
}
document.getElementById("reset").onclick = () => zoom(null);
document.getElementById("smooth").oninput = (event) => { view.smooth = +event.target.value; drawAll(); };
for (const table of document.querySelectorAll(".scroll table")) makeCards(table);
let dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.getElementById("theme").onclick = () => {
  document.documentElement.style.colorScheme = (dark = !dark) ? "dark" : "light";
};
addEventListener("keydown", (event) => { if (event.key === "Escape") { zoom(null); pointAll(null); } });
let asked = 0;
new ResizeObserver(() => { cancelAnimationFrame(asked); asked = requestAnimationFrame(drawAll); })
  .observe(document.getElementById("charts"));
drawAll();
