// Sampled answers of a run: filtered, page by page, each token on the colour of its number.

import {address, ask, el, labelled, number, select} from "./page_parts.js";

const FIELDS = ["step", "group", "text", "reward_min", "reward_max", "truncated", "quantity"];
const QUANTITIES = [
  ["advantage", "advantage"], ["entropy", "entropy"], ["gap", "trainer's log-prob less the engine's"],
  ["surprise", "minus the log-prob"], ["none", "none"],
];

export class SamplesPage {
  title = "Samples";

  constructor(id, parameters) {
    this.id = id;
    this.given = Object.fromEntries(FIELDS.map((name) => [name, parameters.get(name) ?? ""]));
    this.given.quantity ||= "advantage";
    const value = (name, attributes) => el("input", {name, value: this.given[name], ...attributes});
    this.steps = select([["", "all"]], "", {name: "step"});
    this.quantity = select(QUANTITIES, this.given.quantity, {name: "quantity"});
    const form = el("form", {class: "filters", onsubmit: (event) => { event.preventDefault(); this.#search(form); }},
      labelled("Step", this.steps),
      labelled("Text in prompt or answer", value("text", {type: "search"})),
      labelled("Reward from", value("reward_min", {type: "number", step: "any", class: "short"})),
      labelled("to", value("reward_max", {type: "number", step: "any", class: "short"})),
      labelled("Prompt (group)", value("group", {type: "text", class: "short"})),
      labelled("Colour of tokens", this.quantity),
      el("label", {class: "field check"}, el("input", {type: "checkbox", name: "truncated", checked: this.given.truncated === "yes"}), el("span", {}, "Cut off only")),
      el("button", {}, "Show"));
    this.status = el("p", {class: "dim", role: "status"});
    this.key = el("p", {class: "dim"});
    this.groups = el("div");
    this.older = el("button", {type: "button", hidden: true, onclick: () => this.#more()}, "Earlier steps");
    this.node = el("div", {}, el("h1", {}, "Samples of ", el("a", {href: address(`run/${id}`)}, "the run")),
      form, this.status, this.key, this.groups, this.older);
    this.count = 0;
    this.searched = 0;
    this.closing = new AbortController();
  }

  async update() {
    if (this.begun) return;
    this.begun = true;
    const facts = ask("/api/run", new URLSearchParams({run: this.id}));
    await this.#page();
    this.title = `Samples of ${(await facts).name}`;
    this.node.querySelector("h1 a").textContent = (await facts).name;
  }

  close() {
    this.closing.abort();
  }

  #search(form) {
    const chosen = Object.fromEntries(new FormData(form));
    if (chosen.truncated) chosen.truncated = "yes";
    if (chosen.quantity === "advantage") chosen.quantity = "";
    location.hash = address(`samples/${this.id}`, chosen);
  }

  async #more() {
    this.older.disabled = true;
    try {
      await this.#page(this.before);
    } finally {
      this.older.disabled = false;
    }
  }

  async #page(before = "") {
    this.status.textContent = "Looking ...";
    const parameters = new URLSearchParams({run: this.id});
    for (const name of FIELDS.filter((one) => one !== "quantity")) {
      if (this.given[name]) parameters.set(name, this.given[name]);
    }
    if (before !== "") parameters.set("before", before);
    const answer = await ask("/api/samples", parameters, this.closing.signal);
    this.before = answer.before;
    this.searched += answer.searched;
    if (!this.stepsShown) {
      this.stepsShown = true;
      this.steps.append(...select(answer.steps.toReversed().map((step) => [String(step), String(step)]), this.given.step).children);
      this.steps.value = this.given.step;
    }
    const groups = answer.groups.map((group) => ({group, ...this.#group(group)}));
    this.groups.append(...groups.map(({node}) => node));
    this.count += groups.reduce((sum, {group}) => sum + group.answers.length + group.more, 0);
    this.older.hidden = answer.before === null;
    this.status.textContent = this.count
      ? `${this.count} of ${this.searched} answers looked at${answer.before === null ? "" : `; steps before ${answer.before} are not looked at yet`}`
      : answer.steps.length ? "No kept answer is as asked." : "This run has kept no answers.";
    if (this.given.quantity !== "none" && groups.length) this.#colour(groups);
  }

  #group(group) {
    const answers = group.answers.map((row) => {
      const text = el("pre", {}, row.response);
      return {row, text, node: el("div", {class: "answer"}, el("p", {class: "dim"}, this.#facts(row)), text)};
    });
    const node = el("details", {open: true, class: "group"},
      el("summary", {}, `step ${group.step}, `, el("strong", {}, group.prompt_id), `, ${group.answers.length + group.more} answers`),
      el("dl", {}, el("dt", {}, "prompt"), el("dd", {}, group.prompt),
        group.label === null ? "" : [el("dt", {}, "wanted"), el("dd", {}, group.label)]),
      answers.map((answer) => answer.node),
      group.more ? el("p", {class: "dim"}, `and ${group.more} more answers`) : "");
    return {node, answers};
  }

  #facts(row) {
    const parts = Object.entries(row.breakdown).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    return [
      row.reward === null ? `no reward: ${row.failure || row.status}` : `reward ${number(row.reward)}`,
      Object.keys(row.breakdown).length > 1 ? `(${parts})` : "",
      row.advantage === null ? "" : `advantage ${number(row.advantage)}`,
      row.num_tokens === null ? "" : `${row.num_tokens} tokens`,
      row.finish_reason === "length" ? "cut off" : row.finish_reason,
      row.detail,
    ].filter(Boolean).join(" · ");
  }

  /** One group after the other: the server reads the tokenizer once, which takes some seconds. */
  async #colour(groups) {
    if (!this.coloured) this.key.textContent = "The colours of the tokens are read; the first take a while.";
    for (const {group, answers} of groups) {
      if (this.closing.signal.aborted) return;
      const parameters = new URLSearchParams({run: this.id, step: group.step, group: group.prompt_id, quantity: this.given.quantity});
      const found = await ask("/api/tokens", parameters, this.closing.signal).catch((error) => ({answers: {}, why_none: error.message}));
      if (this.closing.signal.aborted) return;
      this.#legend(Object.keys(found.answers).length > 0, found.why_none);
      for (const {row, text} of answers) {
        const tokens = found.answers[row.sample];
        if (tokens) text.replaceChildren(...this.#tokens(tokens));
      }
    }
  }

  #legend(isColoured, why) {
    if (isColoured) {
      this.coloured = true;
      const name = QUANTITIES.find(([value]) => value === this.given.quantity)[1];
      this.key.replaceChildren(`Colours of tokens, by ${name}: `, el("span", {class: "below"}, "below 0"), " ", el("span", {class: "above"}, "above 0"),
        "; the strongest of an answer has the full colour.");
    } else if (!this.coloured) this.key.textContent = why;
  }

  #tokens({pieces, numbers}) {
    const largest = Math.max(...numbers.map((value) => Math.abs(value ?? 0)), 0) || 1;
    return pieces.map((piece, at) => {
      const share = Math.round(100 * Math.abs(numbers[at] ?? 0) / largest);
      if (!share) return document.createTextNode(piece);
      const node = el("span", {title: number(numbers[at])}, piece);
      node.style.background = `color-mix(in srgb, var(--${numbers[at] > 0 ? "better" : "worse"}) ${share}%, transparent)`;
      return node;
    });
  }
}
