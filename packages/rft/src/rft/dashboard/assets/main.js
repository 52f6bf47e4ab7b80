// The pages and their addresses; the page that is open is updated while it is seen.

import {ComparePage} from "./compare_page.js";
import {address, el} from "./page_parts.js";
import {RunList} from "./run_list.js";
import {RunPage} from "./run_page.js";
import {SamplesPage} from "./samples_page.js";

const MILLISECONDS = 3000;
const content = document.getElementById("content");
const pulse = document.getElementById("pulse");
const list = new RunList();
let open = null;
let waiting = new AbortController();
let timer = 0;

const pageOf = (hash) => {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parameters = new URLSearchParams(query);
  const [kind, id] = path.split("/");
  if (kind === "run" && id) return new RunPage(id);
  if (kind === "samples" && id) return new SamplesPage(id, parameters);
  if (kind === "compare") return new ComparePage(parameters.getAll("run"));
  return list;
};

const say = (text) => {
  if (pulse.textContent !== text) pulse.textContent = text;
};

const update = async () => {
  clearTimeout(timer);
  const page = open;
  try {
    if (!document.hidden) await page.update(waiting.signal);
    if (page === open) say("");
  } catch (error) {
    if (error.name === "AbortError" || page !== open) return;
    // of a server that has ended, and of an answer that it refused
    say(error instanceof TypeError ? "The server does not answer; the page waits for it." : error.message);
  }
  if (page !== open) return;
  document.title = page.title;
  timer = setTimeout(update, MILLISECONDS);
};

const show = (moved) => {
  waiting.abort();
  waiting = new AbortController();
  open?.close?.();
  open = pageOf(location.hash);
  content.replaceChildren(open.node);
  say("");
  document.getElementById("pages").replaceChildren(
    el("a", {href: address(""), "aria-current": open === list ? "page" : null}, "Runs"));
  if (moved) {
    scrollTo(0, 0);
    content.focus({preventScroll: true}); // a reader of the screen begins with the new page
  }
  update();
};

document.getElementById("skip").addEventListener("click", () => content.focus());
addEventListener("hashchange", () => show(true));
document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
show(false);
