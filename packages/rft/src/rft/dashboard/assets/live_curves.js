// Curves that grow: points of a run are fetched once, and from then on the new ones alone.

import {ask, colour, el, number} from "./page_parts.js";

const KINDS = ["training", "evaluations"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
export const LINE_COLOURS = 8;

/** The points of one run: `fetchPoints` adds what is new, `points` gives one curve. */
export class RunPoints {
  constructor(run) {
    this.run = run;
    this.tables = {};
    this.asked = "";
  }

  /** Fetch the points of these names that are new; true where anything changed. */
  async fetchPoints(names, signal) {
    const parameters = new URLSearchParams({run: this.run});
    for (const name of names) parameters.append("name", name);
    const same = this.asked === names.join("\n");
    for (const kind of KINDS) {
      const table = this.tables[kind];
      if (same && table) parameters.append(kind, [table.generation, table.width, table.complete].join(","));
    }
    const answer = await ask("/api/curves", parameters, signal);
    let changed = !same;
    for (const kind of KINDS) changed = this.#merge(kind, answer[kind], same) || changed;
    this.asked = names.join("\n");
    return changed;
  }

  #merge(kind, got, same) {
    const old = this.tables[kind];
    const goes = same && old && old.generation === got.generation && old.width === got.rows_a_point;
    const from = goes ? got.start : 0;
    const known = goes ? old : {steps: [], series: {}, rows: -1};
    const series = {};
    for (const name of Object.keys(got.series)) {
      const before = (known.series[name] ?? Array(known.steps.length).fill(null)).slice(0, from);
      while (before.length < from) before.push(null);
      series[name] = before.concat(got.series[name]);
    }
    this.tables[kind] = {
      generation: got.generation, width: got.rows_a_point, complete: got.complete, rows: got.rows,
      steps: known.steps.slice(0, from).concat(got.steps), series, names: got.names, isBehind: got.is_behind,
    };
    return !goes || known.rows !== got.rows;
  }

  get names() {
    return [...new Set(KINDS.flatMap((kind) => this.tables[kind]?.names ?? []))];
  }

  get width() {
    return this.tables.training?.width ?? 1;
  }

  get isBehind() {
    return KINDS.some((kind) => this.tables[kind]?.isBehind);
  }

  /** [places, values] of a curve over steps, or over hours where the run has times. */
  points(name, over = "step") {
    const kind = KINDS.find((one) => name in (this.tables[one]?.series ?? {}));
    if (!kind) return [[], []];
    const {steps, series} = this.tables[kind];
    const times = over === "hours" ? series["time/elapsed"] : null;
    const places = times ? times.map((seconds) => (seconds === null ? null : seconds / 3600)) : steps;
    const kept = places.map((place, index) => [place, series[name][index]])
      .filter(([place, value]) => place !== null && value !== null)
      .sort((a, b) => a[0] - b[0]);
    return [kept.map(([place]) => place), kept.map(([, value]) => value)];
  }
}

/** Exponential mean; `share` is that of the value before, 0 leaves the values as they are. */
export const smoothed = (values, share) => {
  if (!share) return values;
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
};

/** Several curves over one axis: every place of any of them once. */
const joined = (curves) => {
  const places = [...new Set(curves.flatMap(([xs]) => xs))].sort((a, b) => a - b);
  const index = new Map(places.map((place, at) => [place, at]));
  const columns = curves.map(([xs, ys]) => {
    const column = Array(places.length).fill(undefined); // uPlot joins over these, and breaks a line at null
    xs.forEach((x, at) => { column[index.get(x)] = ys[at]; });
    return column;
  });
  return [places, ...columns];
};

const summary = (label, values) => {
  if (!values.length) return `${label}: no values`;
  let [low, high] = [values[0], values[0]];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return `${label}: first ${number(values[0])}, last ${number(values.at(-1))}, lowest ${number(low)}, ` +
    `highest ${number(high)}`;
};

/** A figure with one or more curves of a metric. `lines` of `show` are {label, points: [xs, ys], colour}. */
export class CurveFigure {
  constructor(name, {height = 220, onremove = null} = {}) {
    this.name = name;
    this.height = height;
    this.plot = null;
    this.caption = el("span", {}, name);
    this.place = el("div", {class: "plot", role: "img"});
    this.node = el("figure", {},
      el("figcaption", {}, this.caption,
        onremove && el("button", {type: "button", class: "small", onclick: onremove, "aria-label": `Remove ${name}`}, "Remove")),
      this.place);
    this.lines = [];
    this.shape = "";
  }

  show(lines, {over = "step", smoothing = 0, log = false} = {}) {
    this.lines = lines;
    this.options = {over, smoothing, log};
    this.draw();
  }

  draw() {
    if (!this.options) return;
    const {over, smoothing, log} = this.options;
    const positive = ([xs, ys]) => {
      if (!log) return [xs, ys];
      const kept = ys.map((y, at) => at).filter((at) => ys[at] > 0);
      return [kept.map((at) => xs[at]), kept.map((at) => ys[at])];
    };
    const curves = this.lines.map(({points: [xs, ys]}) => positive([xs, smoothed(ys, smoothing)]));
    const width = this.place.clientWidth;
    if (!width) return;
    const one = this.lines.length === 1 ? this.lines[0].points[1] : null;
    this.caption.textContent = one?.length ? `${this.name}, at the end ${number(one.at(-1))}` : this.name;
    this.place.setAttribute("aria-label", this.lines.map(({label, points}) => summary(label, points[1])).join("; "));
    const data = joined(curves);
    const shape = JSON.stringify([width, over, log, this.lines.map(({label, colour: tone}) => [label, tone]), colour("--text"), data[0].length < 40]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.shape = shape;
    this.plot = new uPlot(this.#settings(width, over, log, data[0].length < 40), data, this.place);
  }

  #settings(width, over, log, dots) {
    const axis = {stroke: colour("--dim"), grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line")}};
    return {
      width, height: this.height,
      cursor: {sync: {key: "steps"}, drag: {x: true, y: false}},
      scales: {x: {time: false}, y: log ? {distr: 3} : {}},
      series: [
        {label: over, value: (_, value) => number(value)},
        ...this.lines.map(({label, colour: tone}) => ({
          label, stroke: colour(`--line-${tone % LINE_COLOURS}`), width: 1.75, spanGaps: true, points: {show: dots, size: 4},
          dash: DASHES[Math.floor(tone / 2) % DASHES.length], value: (_, value) => number(value),
        })),
      ],
      axes: [axis, {...axis, size: 64, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick)))}],
    };
  }

  close() {
    this.plot?.destroy();
    this.plot = null;
  }
}

/** Draw figures anew when the page gets another width or other colours; returns what ends that. */
export const redrawn = (figures) => {
  let asked = 0;
  const redraw = () => {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => figures().forEach((figure) => figure.draw()));
  };
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("resize", redraw);
  scheme.addEventListener("change", redraw);
  return () => {
    removeEventListener("resize", redraw);
    scheme.removeEventListener("change", redraw);
  };
};

