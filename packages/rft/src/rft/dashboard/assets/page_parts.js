// Parts of pages: elements, numbers and times as text, and answers of the server.

/** Make an element; texts become text nodes, and are never read as HTML. */
export const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
};

export const section = (title, ...children) => {
  const heading = el("h2", {}, title);
  heading.id = `head-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return el("section", {"aria-labelledby": heading.id}, heading, ...children);
};

/** A table that may be wider than the page; cells are texts or nodes. */
export const table = (caption, heads, rows) =>
  el("div", {class: "wide", tabindex: "0", role: "region", "aria-label": caption},
    el("table", {},
      el("caption", {class: "unseen"}, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", {scope: "col"}, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell ?? "")))))));

/** Labelled control: the label is above it. */
export const labelled = (text, control) => el("label", {class: "field"}, el("span", {}, text), control);

export const select = (options, chosen, attributes = {}) =>
  el("select", attributes, options.map(([value, text]) => {
    const option = el("option", {value}, text);
    option.selected = value === chosen;
    return option;
  }));

export const number = (value) => {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
};

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.round(seconds);
  if (whole < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor(whole % 3600 / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
};

export const ago = (now, then) => {
  if (!then) return "";
  const seconds = Math.max(0, now - then);
  return seconds < 10 ? "just now" : `${duration(seconds)} ago`;
};

export const STATES = {
  running: "running", ended: "ended", stopped: "stopped", failed: "failed", unreadable: "cannot be read",
};
export const badge = (state) => el("span", {class: `state state-${state}`}, STATES[state] ?? state);

/** An address within the page: `address("compare", {run: [a, b]})`. */
export const address = (page, parameters = {}) => {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(name, one);
    }
  }
  const text = query.toString();
  return `#/${page}${text ? `?${text}` : ""}`;
};

export class Refused extends Error {}

/** Ask the server; `parameters` is a URLSearchParams. */
export const ask = async (path, parameters = new URLSearchParams(), signal = undefined) => {
  const answer = await fetch(`${path}?${parameters}`, {signal, headers: {Accept: "application/json"}});
  if (answer.status === 401) {
    location.reload(); // the server was started anew, and asks for its token
    throw new Refused("the token is asked for again");
  }
  const body = await answer.json();
  if (!answer.ok) throw new Refused(body.error ?? `HTTP ${answer.status}`);
  return body;
};

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Puts a new node in the place of the old one where what it shows has changed: focus and selections stay. */
export class Part {
  constructor(make) {
    this.make = make;
    this.node = el("div");
    this.shown = undefined;
  }

  show(value) {
    const text = JSON.stringify(value);
    if (text === this.shown) return;
    this.shown = text;
    const made = this.make(value);
    this.node.replaceChildren(...(made === null ? [] : [made].flat()));
  }
}
