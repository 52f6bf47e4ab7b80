// The list of runs: found anew while the page is open, filtered, and chosen for a comparison.

import {STATES, address, ago, ask, badge, el, labelled, number, select} from "./page_parts.js";

const MOST_COMPARED = 8;

export class RunList {
  title = "Runs";

  constructor() {
    this.chosen = new Set();
    this.rows = new Map();
    this.runs = [];
    this.search = el("input", {type: "search", placeholder: "name, command or folder", oninput: () => this.#draw()});
    this.state = select([["", "all"], ...Object.entries(STATES)], "", {onchange: () => this.#draw()});
    this.compare = el("button", {type: "button", onclick: () => this.#compare()}, "Compare");
    this.hint = el("span", {class: "dim", role: "status"});
    this.body = el("tbody", {role: "rowgroup"});
    this.note = el("p", {class: "dim"});
    const heads = ["", "Run", "State", "Step", "Last value", "Written"];
    this.node = el("div", {},
      el("h1", {}, "Runs"),
      el("div", {class: "filters"},
        labelled("Search", this.search), labelled("State", this.state),
        el("div", {class: "field"}, this.hint, this.compare)),
      el("table", {class: "runs", role: "table", "aria-label": "Runs, the last written first"},
        el("thead", {role: "rowgroup"}, el("tr", {role: "row"}, heads.map((head) =>
          el("th", {scope: "col", role: "columnheader"}, head || el("span", {class: "unseen"}, "Choose"))))),
        this.body),
      this.note);
    this.#drawChoice();
  }

  async update(signal) {
    const answer = await ask("/api/runs", new URLSearchParams(), signal);
    this.runs = answer.runs;
    this.now = answer.now;
    this.folders = answer.folders;
    this.isCut = answer.is_cut;
    this.#draw();
  }

  #draw() {
    const text = this.search.value.trim().toLowerCase();
    const shown = this.runs.filter((run) =>
      (!this.state.value || run.state === this.state.value) &&
      (!text || `${run.name} ${run.verb} ${run.place}`.toLowerCase().includes(text)));
    const nodes = shown.map((run) => this.#row(run));
    // only where the order has changed: a row that stays keeps the focus
    if (nodes.some((node, at) => this.body.children[at] !== node) || this.body.children.length !== nodes.length) {
      const focused = document.activeElement;
      this.body.replaceChildren(...nodes);
      if (this.body.contains(focused)) focused.focus();
    }
    const known = new Set(this.runs.map((run) => run.id));
    for (const id of this.rows.keys()) if (!known.has(id)) this.rows.delete(id);
    for (const id of [...this.chosen]) if (!known.has(id)) this.chosen.delete(id);
    const among = this.folders ? `in ${this.folders.join(", ")}` : "";
    this.note.textContent = this.runs.length
      ? `${shown.length} of ${this.runs.length} runs ${among}${this.isCut ? "; there are more, which are not shown: name a folder further down" : ""}`
      : `No run ${among} yet. A run appears here when it begins.`;
  }

  #row(run) {
    const entry = this.rows.get(run.id) ?? this.#newRow(run);
    const text = JSON.stringify(run);
    if (entry.text !== text) {
      entry.text = text;
      const steps = run.num_steps ? `${run.step ?? 0} / ${run.num_steps}` : run.step ?? "";
      entry.state.replaceChildren(badge(run.state), run.why ? el("span", {class: "why"}, run.why) : "");
      entry.step.textContent = steps;
      entry.value.replaceChildren(...(run.value === null ? [] :
        [el("span", {class: "dim"}, `${run.measure} `), number(run.value)]));
    }
    entry.touched.textContent = ago(this.now, run.touched);
    return entry.node;
  }

  #newRow(run) {
    const box = el("input", {type: "checkbox", "aria-label": `Choose ${run.name}`, disabled: run.state === "unreadable",
      onchange: () => { this.chosen[box.checked ? "add" : "delete"](run.id); this.#drawChoice(); }});
    const name = run.state === "unreadable" ? run.name : el("a", {href: address(`run/${run.id}`)}, run.name);
    const cell = (label, ...children) => el("td", {role: "cell", "data-label": label}, ...children);
    const entry = {
      state: cell("State"), step: cell("Step"), value: cell("Last value"), touched: cell("Written"), text: "",
    };
    entry.node = el("tr", {role: "row"},
      el("td", {role: "cell", class: "choose"}, el("label", {class: "hit"}, box)),
      el("td", {role: "cell", class: "name"}, name,
        el("span", {class: "dim"}, [run.verb, run.place].filter(Boolean).join(" in "))),
      entry.state, entry.step, entry.value, entry.touched);
    this.rows.set(run.id, entry);
    return entry;
  }

  #drawChoice() {
    const count = this.chosen.size;
    this.compare.disabled = count < 2 || count > MOST_COMPARED;
    this.hint.textContent = count > MOST_COMPARED ? `at most ${MOST_COMPARED} runs` :
      count < 2 ? "choose 2 runs or more" : `${count} runs chosen`;
  }

  #compare() {
    // in the order of the list
    location.hash = address("compare", {run: this.runs.map((run) => run.id).filter((id) => this.chosen.has(id))});
  }
}
