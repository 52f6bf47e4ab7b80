// Several runs beside one another: a metric of all in one figure, and the settings in which they differ.

import {CurveFigure, RunPoints, redrawn} from "./live_curves.js";
import {address, ask, el, labelled, section, select, table} from "./page_parts.js";
import {axisControls} from "./run_page.js";

export class ComparePage {
  title = "Comparison";

  constructor(ids) {
    this.ids = ids;
    this.points = ids.map((id) => new RunPoints(id));
    this.figures = new Map();
    this.axis = axisControls(() => this.#draw());
    this.more = el("select", {onchange: () => this.#addCurve()});
    this.curves = el("div", {id: "curves", class: "several"});
    this.legend = el("ul", {class: "legend"});
    this.settings = el("div");
    this.node = el("div", {},
      el("h1", {}, `Comparison of ${ids.length} runs`), this.legend,
      section("Curves", el("div", {class: "filters"}, labelled("Another curve", this.more), ...this.axis.nodes), this.curves),
      this.settings);
    this.stop = redrawn(() => [...this.figures.values()]);
  }

  async update(signal) {
    if (!this.facts) {
      this.facts = await ask("/api/compare", new URLSearchParams(this.ids.map((id) => ["run", id])), signal);
      this.#showRuns();
      for (const name of this.facts.curves.length ? this.facts.curves : this.facts.names.slice(0, 2)) this.#add(name);
      this.#showNames();
    }
    const names = [...this.figures.keys(), "time/elapsed"];
    const changed = await Promise.all(this.points.map((points) => points.fetchPoints(names, signal)));
    if (changed.some(Boolean)) this.#draw();
  }

  close() {
    this.stop();
    this.figures.forEach((figure) => figure.close());
  }

  #showRuns() {
    const {runs, settings} = this.facts;
    this.legend.replaceChildren(...runs.map((run, at) => el("li", {},
      el("span", {class: `key line-${at}`, "aria-hidden": "true"}),
      el("a", {href: address(`run/${run.id}`)}, run.name), el("span", {class: "dim"}, ` ${run.verb}, ${run.outcome}`))));
    this.settings.replaceChildren(section("Settings that differ",
      settings.length ? table("Settings that differ", ["setting", ...runs.map((run) => run.name)],
        settings.map(([name, ...values]) => [name, ...values.map((value) => value ?? "(none)")]))
        : el("p", {}, "The settings of these runs are the same.")));
  }

  #add(name) {
    const figure = new CurveFigure(name, {height: 260, onremove: () => {
      figure.close();
      figure.node.remove();
      this.figures.delete(name);
      this.#showNames();
      this.more.focus();
    }});
    this.figures.set(name, figure);
    this.curves.append(figure.node);
  }

  async #addCurve() {
    if (!this.more.value) return;
    this.#add(this.more.value);
    this.#showNames();
    const names = [...this.figures.keys(), "time/elapsed"];
    await Promise.all(this.points.map((points) => points.fetchPoints(names)));
    this.#draw();
  }

  #showNames() {
    const names = this.facts.names.filter((name) => !this.figures.has(name)).sort();
    this.more.replaceChildren(...select([["", "choose"], ...names.map((name) => [name, name])], "").children);
    this.more.value = "";
  }

  #draw() {
    for (const [name, figure] of this.figures) {
      const lines = this.points.map((points, at) => ({
        label: this.facts.runs[at].name, points: points.points(name, this.axis.options.over), colour: at,
      }));
      figure.show(lines.filter(({points}) => points[0].length), this.axis.options);
    }
  }
}
