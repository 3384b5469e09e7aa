// Draws the charts of a page: each figure.chart has its data as JSON. Fetches nothing.
// The vertical line of the pointer is in all charts of the same axis, and legends show values there.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const EDGE = {left: 50, right: 18, top: 10, bottom: 20, height: 190};
const MANY = 100;  // points; a curve of more is smoothed at first
const FEW = 30;  // points; a curve of more has no markers

const find = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const finite = values => values.filter(Number.isFinite);
const lowest = values => values.reduce((a, b) => Math.min(a, b), Infinity);  // also of very many
const highest = values => values.reduce((a, b) => Math.max(a, b), -Infinity);
const escaped = text => text.replace(/[&<>"]/g, letter => `&#${letter.charCodeAt(0)};`);

function words(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return value.toLocaleString("en", {maximumSignificantDigits: size >= 1000 ? 7 : 4,
    maximumFractionDigits: 4, roundingPriority: "lessPrecision"});
}

function ticks(low, high, isLog) {
  if (isLog) {
    const every = Math.max(1, Math.ceil((high - low) / 4));
    return Array.from({length: Math.floor(high) - Math.ceil(low) + 1}, (_, i) => Math.ceil(low) + i)
      .filter(x => x % every === 0);
  }
  const raw = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(n => n * unit).find(size => size >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step + 0);  // no -0
  return found;
}

// An exponential mean in which each value counts `share` times as much as the one after it.
function smoothed(values, share) {
  let mean = 0, weight = 0;
  return values.map(value => {
    if (!Number.isFinite(value)) return value;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

class Board {
  constructor() {
    this.controls = document.getElementById("controls");
    this.clocks = this.controls ? JSON.parse(this.controls.dataset.clocks) : [];
    this.charts = find("figure.chart").map(figure => new Chart(figure, this));
    const longest = Math.max(0, ...this.charts.filter(chart => chart.isOfSteps).flatMap(chart => chart.lines.map(line => line.x.length)));
    if (this.controls) {
      this.controls.smoothing.value = longest > MANY ? 0.6 : 0;
      this.controls.addEventListener("input", () => { this.measure(); this.charts.forEach(chart => chart.draw()); });
    }
    this.measure();
    const resized = new ResizeObserver(found => found.forEach(each => each.target.chart.draw()));
    this.charts.forEach(chart => resized.observe(chart.svg));
  }
  // All charts over steps have the same range.
  measure() {
    const x = finite(this.charts.filter(chart => chart.isOfSteps).flatMap(chart => chart.xs).flat());
    const low = this.isTimed ? 0 : lowest(x);
    this.ends = [low, Math.max(low + (this.isTimed ? 1e-3 : 1), highest(x))];
  }
  get smoothing() { return this.controls ? +this.controls.smoothing.value : 0; }
  get isTimed() { return this.controls?.axis.value === "minutes"; }
  minutes(run, step) {
    const {steps, minutes} = this.clocks[run];
    const i = Math.max(1, steps.findIndex(each => each >= step));
    const share = (step - steps[i - 1]) / (steps[i] - steps[i - 1] || 1);
    return minutes[i - 1] + share * (minutes[i] - minutes[i - 1]);
  }
  point(chart, x) {
    for (const each of this.charts) if (each === chart || (each.isOfSteps && chart.isOfSteps)) each.point(x);
  }
}

class Chart {
  constructor(figure, board) {
    Object.assign(this, JSON.parse(figure.dataset.chart), {figure, board});
    this.isOfSteps = !this.across;
    this.svg = figure.querySelector("svg");
    this.svg.chart = this;
    this.place = figure.querySelector("output");
    this.lines.forEach(line => { line.ink = line.colour == null ? "currentColor" : COLOURS[line.colour % COLOURS.length]; });
    figure.querySelector(".legend").innerHTML = this.lines.map(line =>
      `<span style="color:${line.ink}"><svg class="key"><path d="M0 6H16" stroke-dasharray="${DASHES[(line.dash || 0) % 4]}"/></svg>` +
      `<span>${escaped(line.name)} <b></b></span></span>`).join("");
    this.values = find(".legend b", figure);
    this.svg.addEventListener("pointermove", event => {
      if (!this.pointer) return;
      const left = event.clientX - this.svg.getBoundingClientRect().left - EDGE.left;
      board.point(this, this.low[0] + left / this.width * (this.high[0] - this.low[0]));
    });
    this.svg.addEventListener("pointerleave", () => board.point(this, null));
  }

  get xs() {
    return this.lines.map(line => this.isOfSteps && this.board.isTimed
      ? line.x.map(step => this.board.minutes(line.run, step)) : line.x);
  }

  // The ranges of both axes.
  measure() {
    const spread = line => line.y.flatMap((y, i) => y == null ? [] : [y, y - line.half?.[i], y + line.half?.[i]]);
    const all = finite(this.lines.flatMap(spread)).filter(y => !this.log || y > 0);
    const y = this.log ? all.map(Math.log10) : all;
    let low = lowest(y), high = highest(y);
    if (!y.length) [low, high] = [0, 1];
    if (this.log && high - low < 1) [low, high] = [Math.floor(low), Math.ceil(high + 1e-9)];
    if (!this.log && low > 0 && low < 0.6 * high) low = 0;
    if (low === high) [low, high] = [Math.min(0, 1.2 * low), Math.max(0, 1.2 * high) || 1];
    const room = this.bands ? 0.3 : 0.05;
    const ends = (this.bands || []).flatMap(([, begin, end]) => [begin, end]);
    const x = this.isOfSteps ? this.board.ends : finite([0, 1e-6, ...ends, ...this.at.flat()]);
    this.low = [lowest(x), low === 0 ? 0 : low - 0.05 * (high - low)];
    this.high = [highest(x), high + room * (high - low)];
    this.width = Math.max(10, this.svg.clientWidth - EDGE.left - EDGE.right);
  }

  across_(x) { return EDGE.left + (x - this.low[0]) / (this.high[0] - this.low[0]) * this.width; }
  up(y) {
    const value = this.log ? Math.log10(y) : y;
    return EDGE.top + (1 - (value - this.low[1]) / (this.high[1] - this.low[1])) * EDGE.height;
  }

  path(xs, ys, isStairs) {
    let text = "", isOpen = false;
    ys.forEach((y, i) => {
      const isShown = Number.isFinite(y) && Number.isFinite(xs[i]) && (!this.log || y > 0);
      const [left, top] = [this.across_(xs[i]).toFixed(1), isShown && this.up(y).toFixed(1)];
      if (isShown) text += !isOpen ? `M${left} ${top}h.01` : isStairs ? `H${left}V${top}` : `L${left} ${top}`;
      isOpen = isShown;
    });
    return text;
  }

  draw() {
    if (!this.svg.clientWidth) return;  // in a section that is closed
    this.at = this.xs;
    this.measure();
    this.svg.innerHTML = this.grid() + (this.bands || []).map(band => this.band(band)).join("") +
      this.lines.map((line, i) => this.line(line, this.at[i])).join("") + '<line class="pointer"/>';
    this.pointer = this.svg.querySelector(".pointer");
    this.point(null);
  }

  grid() {
    const bottom = EDGE.top + EDGE.height, right = EDGE.left + this.width;
    const rows = ticks(this.low[1], this.high[1], this.log).map(y => {
      const value = this.log ? 10 ** y : y, top = this.up(value);
      return `<line class="rule" x1="${EDGE.left}" x2="${right}" y1="${top}" y2="${top}"/>` +
        `<text x="${EDGE.left - 6}" y="${top + 4}" text-anchor="end">${words(value)}</text>`;
    });
    const columns = ticks(this.low[0], this.high[0]).filter(x => !this.isOfSteps || this.board.isTimed || x % 1 === 0)
      .map(x => `<text x="${this.across_(x)}" y="${bottom + 15}" text-anchor="middle">${words(x)}</text>`);
    return rows.join("") + columns.join("");
  }

  band([name, begin, end, colour, opacity]) {
    const left = this.across_(begin), width = this.across_(end) - left;
    const label = width < 8 * name.length ? "" :
      `<text class="name" x="${left + width / 2}" y="${EDGE.top + 14}" text-anchor="middle">${escaped(name)}</text>`;
    return `<rect x="${left}" y="${EDGE.top}" width="${Math.max(1, width)}" height="${EDGE.height}" fill="${colour}" opacity="${opacity}"/>${label}`;
  }

  line(line, xs) {
    const style = `stroke="${line.ink}" stroke-dasharray="${DASHES[(line.dash || 0) % 4]}"`;
    const isSmoothed = this.isOfSteps && !line.sparse && this.board.smoothing > 0;
    const ys = isSmoothed ? smoothed(line.mean ?? line.y, this.board.smoothing) : line.y;
    const raw = isSmoothed ? `<path class="raw" d="${this.path(xs, line.y)}" stroke="${line.ink}"/>` : "";
    const bars = (line.half || []).map((half, i) => half && line.y[i] != null ?
      `<path class="raw" d="${this.path([xs[i], xs[i]], [line.y[i] - half, line.y[i] + half])}" stroke="${line.ink}"/>` : "").join("");
    const dots = line.y.length > FEW || !this.isOfSteps ? "" :
      `<path class="dots" d="${xs.map((x, i) => this.path([x], [ys[i]])).join("")}" stroke="${line.ink}"/>`;
    return `${raw}${bars}<path class="line" d="${this.path(xs, ys, line.stairs)}" ${style}/>${dots}`;
  }

  // Shows the values at x, or those at the end if it is null.
  point(x) {
    if (!this.pointer) return;
    const isInside = x !== null && x >= this.low[0] && x <= this.high[0];
    const place = this.across_(isInside ? x : 0);
    ["x1", "x2"].forEach(name => this.pointer.setAttribute(name, place));
    this.pointer.setAttribute("y1", EDGE.top);
    this.pointer.setAttribute("y2", isInside ? EDGE.top + EDGE.height : EDGE.top);
    const unit = !this.isOfSteps ? "s" : this.board.isTimed ? "min" : "step";
    const layout = (this.bands || []).find(([name, begin, end]) => name && x >= begin && x <= end);
    this.place.textContent = !isInside ? "" : unit === "step" ? `step ${Math.round(x)}` : `${words(x)} ${unit} ${layout ? layout[0] : ""}`;
    this.lines.forEach((line, i) => {
      const j = isInside ? this.nearest(this.at[i], x, line) : line.y.findLastIndex(Number.isFinite);
      const half = line.half?.[j] ? ` ± ${words(line.half[j])}` : "";
      const isShown = this.isOfSteps || (isInside && line.stairs);
      this.values[i].textContent = isShown ? `${words(line.y[j])}${half}` : "";
    });
  }

  // The index of the nearest value; of stairs, that of the last before x.
  nearest(xs, x, line) {
    let best = -1;
    xs.forEach((at, i) => {
      if (!Number.isFinite(line.y[i])) return;
      if (line.stairs ? at <= x : best < 0 || Math.abs(at - x) < Math.abs(xs[best] - x)) best = i;
    });
    return best;
  }
}

addEventListener("DOMContentLoaded", () => new Board());
