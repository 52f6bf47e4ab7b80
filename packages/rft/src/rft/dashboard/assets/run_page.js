// One run: how it stands, its curves, where its time went, what its rows show to be wrong, and its settings.

import {CurveFigure, RunPoints, redrawn} from "./live_curves.js";
import {Part, address, ago, ask, badge, duration, el, labelled, number, section, select, table} from "./page_parts.js";

const SMOOTHINGS = [["0", "none"], ["0.6", "weak"], ["0.9", "medium"], ["0.97", "strong"]];
const EVALUATIONS = /^eval\/(accuracy|loss|reward)$/;

export const axisControls = (onchange) => {
  const controls = {
    over: select([["step", "step"], ["hours", "hours"]], "step", {onchange}),
    smoothing: select(SMOOTHINGS, "0", {onchange}),
    log: el("input", {type: "checkbox", onchange}),
  };
  return {
    nodes: [labelled("Over", controls.over), labelled("Smoothing", controls.smoothing),
      el("label", {class: "field check"}, controls.log, el("span", {}, "Logarithmic"))],
    get options() {
      return {over: controls.over.value, smoothing: Number(controls.smoothing.value), log: controls.log.checked};
    },
  };
};

export class RunPage {
  constructor(id) {
    this.id = id;
    this.title = "Run";
    this.points = new RunPoints(id);
    this.figures = new Map();
    this.removed = new Set();
    this.axis = axisControls(() => this.#drawCurves());
    this.more = el("select", {onchange: () => this.#addCurve()});
    this.curves = el("div", {id: "curves"});
    this.thinned = el("p", {class: "dim"});
    this.parts = {
      head: new Part((facts) => this.#head(facts)),
      figures: new Part((rows) => el("dl", {class: "figures"}, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))),
      findings: new Part((facts) => this.#findings(facts)),
      phases: new Part((phases) => this.#phases(phases)),
      held: new Part((rows) => rows.length
        ? section("Held-out rows", table("Held-out rows", ["number", "before", "after"], rows.map(([name, ...pair]) => [name, ...pair.map(number)]))) : null),
      left: new Part((counts) => Object.keys(counts).length
        ? section("Responses left out", table("Responses left out", ["reason", "responses"], Object.entries(counts).map(([name, count]) => [name, String(count)]))) : null),
      settings: new Part((settings) => this.#settings(settings)),
      files: new Part((facts) => this.#files(facts)),
    };
    const {head, figures, findings, phases, held, left, settings, files} = this.parts;
    this.node = el("div", {}, head.node, figures.node, findings.node,
      section("Curves",
        el("div", {class: "filters"}, labelled("Another curve", this.more), ...this.axis.nodes),
        this.thinned, this.curves),
      phases.node, held.node, left.node, settings.node, files.node);
    this.stop = redrawn(() => [...this.figures.values()]);
  }

  async update(signal) {
    const facts = await ask("/api/run", new URLSearchParams({run: this.id}), signal);
    this.title = facts.name;
    this.#show(facts);
    // a command of a package that is not here says nothing of its curves
    const named = facts.curves.length ? facts.curves : this.points.names.filter((name) => !name.startsWith("time/")).slice(0, 4);
    const wanted = [...named, ...this.points.names.filter((name) => EVALUATIONS.test(name))];
    for (const name of wanted) if (!this.figures.has(name) && !this.removed.has(name)) this.#add(name);
    // one more look where the names of evaluations were not known yet
    const before = this.points.names.length;
    if (await this.points.fetchPoints(this.#names(), signal)) this.#drawCurves();
    if (this.points.names.length !== before) {
      this.#showNames();
      for (const name of this.points.names.filter((one) => EVALUATIONS.test(one))) {
        if (!this.figures.has(name) && !this.removed.has(name)) this.#add(name);
      }
      if (await this.points.fetchPoints(this.#names(), signal)) this.#drawCurves();
    }
  }

  close() {
    this.stop();
    this.figures.forEach((figure) => figure.close());
  }

  #names() {
    return [...this.figures.keys(), "time/elapsed"];
  }

  #show(facts) {
    const {parts} = this;
    parts.head.show({name: facts.name, verb: facts.verb, state: facts.state, why: facts.why, sentence: facts.sentence, rollouts: facts.rollout_steps.length});
    parts.figures.show([
      ["step", facts.num_steps ? `${facts.step} of ${facts.num_steps}` : String(facts.step)],
      ...(facts.value === null ? [] : [[facts.measure, number(facts.value)]]),
      ["time", duration(facts.seconds)],
      ...(facts.left === null ? [] : [["left", duration(facts.left)]]),
      ["last written", facts.state === "running" ? ago(facts.now, facts.touched) : new Date(facts.touched * 1000).toLocaleString()],
    ]);
    parts.findings.show({findings: facts.findings, alarms: facts.alarms, damage: facts.damage, speed: facts.speed, state: facts.state, step: facts.step > 0});
    parts.phases.show(facts.phases);
    parts.held.show(facts.evaluations);
    parts.left.show(facts.left_out);
    parts.settings.show(facts.settings);
    parts.files.show({command: facts.command, path: facts.path, checkpoints: facts.checkpoints});
  }

  #head({name, verb, state, why, sentence, rollouts}) {
    return [
      el("h1", {}, name, " ", badge(state)),
      el("p", {}, verb ? el("span", {class: "dim"}, `rft-train ${verb}  `) : "", sentence),
      why ? el("p", {class: "warning"}, why) : "",
      rollouts ? el("p", {}, el("a", {href: address(`samples/${this.id}`)}, "Samples"), el("span", {class: "dim"}, ` of ${rollouts} ${rollouts === 1 ? "step" : "steps"}`)) : "",
    ].filter((node) => node !== "");
  }

  #findings({findings, alarms, damage, speed, step}) {
    const nodes = [];
    if (findings.length) nodes.push(table("Findings", ["what the rows show", "what to look at"], findings.map((one) => [one.what, one.do])));
    else if (step) nodes.push(el("p", {}, "The rows of this run show nothing wrong."));
    if (speed.what) nodes.push(el("p", {}, `Speed: ${speed.what}${speed.do ? `; ${speed.do}` : ""}`));
    if (alarms.length) {
      nodes.push(el("details", {}, el("summary", {}, `What the guard of the optimizer steps found (${alarms.length})`),
        table("Alarms", ["step", "what"], alarms.map(([at, text]) => [String(at ?? ""), text]))));
    }
    nodes.push(...damage.map((text) => el("p", {class: "warning"}, text)));
    return nodes.length ? section("Verdict", ...nodes) : null;
  }

  #phases(phases) {
    if (!phases.length) return null;
    const bar = el("div", {class: "bar", role: "img",
      "aria-label": phases.map(([, name, , share]) => `${name} ${(100 * share).toFixed(1)} %`).join(", ")},
    phases.map(([tone, name, , share]) => {
      const part = el("span", {class: `phase phase-${tone}`, title: `${name} ${(100 * share).toFixed(1)} %`});
      part.style.flexGrow = share;
      return part;
    }));
    const rows = phases.map(([tone, name, seconds, share]) =>
      [el("span", {}, el("span", {class: `key phase-${tone}`}), name), duration(seconds), `${(100 * share).toFixed(1)} %`]);
    return section("Where the time went", bar, table("Phases", ["phase", "time", "share"], rows));
  }

  #settings(settings) {
    const ofRecipe = settings.filter(([, , origin]) => origin.startsWith("recipe"));
    const own = settings.filter((row) => !ofRecipe.includes(row));
    const heads = ["setting", "value", "from"];
    return section("Settings that are no defaults",
      own.length ? table("Settings", heads, own) : el("p", {}, "None beside the recipe's."),
      ofRecipe.length ? el("details", {}, el("summary", {}, `the recipe's ${ofRecipe.length}`), table("Settings of the recipe", heads, ofRecipe)) : "");
  }

  #files({command, path, checkpoints}) {
    return section("Command", el("pre", {}, command || "not known"), el("p", {class: "dim"}, path),
      checkpoints.length ? el("p", {class: "dim"}, `checkpoints: ${checkpoints.join(", ")}`) : "");
  }

  #add(name) {
    const figure = new CurveFigure(name, {onremove: () => {
      figure.close();
      figure.node.remove();
      this.figures.delete(name);
      this.removed.add(name);
      this.#showNames();
      this.more.focus();
    }});
    this.figures.set(name, figure);
  }

  async #addCurve() {
    const name = this.more.value;
    if (!name) return;
    this.removed.delete(name);
    this.#add(name);
    await this.points.fetchPoints(this.#names());
    this.#drawCurves();
    this.#showNames();
  }

  #showNames() {
    const names = this.points.names.filter((name) => !this.figures.has(name)).sort();
    this.more.replaceChildren(...select([["", "choose"], ...names.map((name) => [name, name])], "").children);
    this.more.value = "";
  }

  #drawCurves() {
    for (const [name, figure] of this.figures) {
      const points = this.points.points(name, this.axis.options.over);
      // a curve of the command that this run does not have is left out
      if (!points[0].length) figure.node.remove();
      else if (!figure.node.isConnected) this.curves.append(figure.node);
      if (points[0].length) figure.show([{label: name, points, colour: 0}], this.axis.options);
    }
    const texts = [this.points.width > 1 ? `A point is the mean of ${this.points.width} steps.` : "",
      this.points.isBehind ? "The rows are still being read." : "", this.curves.children.length ? "" : "No step is written yet."];
    this.thinned.textContent = texts.filter(Boolean).join(" ");
  }
}
