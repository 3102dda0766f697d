// What every tab uses: elements, numbers, data that load when asked, and the address.
// Session text goes into the page through textContent, or as Markdown that is sanitized.
const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const words = (text) => String(text).replaceAll("_", " ");
const several = (n, name) => `${number.format(n)} ${name}${n === 1 ? "" : "s"}`;
// Of a session, in words; nothing is said of what there is none of.
const wentWrong = (s) => [s.n_errors && several(s.n_errors, "error"), s.n_interrupted && several(s.n_interrupted, "interruption")].filter(Boolean).join(", ");
const percent = (share, digits = 0) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;
const dollars = (usd, digits = 2) =>
  usd === null || usd === undefined ? "no price" : `$${usd.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
const fine = (usd) => dollars(usd, usd && usd < 1 ? 4 : 2);
const normalized = (text) => text.normalize("NFKC").toLowerCase();
// The same with as many signs, so that a place in one is a place in the other.
const flatOf = (text) => [normalized(text), text.toLowerCase(), text].find((each) => each.length === text.length);
const isoDay = (at) => (at ?? "").slice(0, 10);
const moment = (at) => (at ?? "").replace("T", " ").slice(0, 16);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

function element(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content.filter((each) => each !== null && each !== undefined && each !== false).map((each) => (each instanceof Node ? each : String(each))));
  return made;
}

function link(label, address, className = "") {
  const made = element("a", className, label);
  made.href = address;
  return made;
}

function button(label, className, act) {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

// `columns`: [heading, cell(row), kind] where kind is "n" for numbers; a cell is a node or a text.
function table(columns, rows, caption) {
  const made = element("table");
  if (caption) made.append(element("caption", "", caption));
  const head = element("tr", "", ...columns.map(([name, , kind]) => {
    const cell = element("th", kind ?? "", name);
    cell.scope = "col";
    return cell;
  }));
  made.append(element("thead", "", head), element("tbody", "", ...rows.map((row) =>
    element("tr", "", ...columns.map(([, cell, kind]) => element("td", kind ?? "", cell(row)))))));
  const scroll = element("div", "scroll", made);
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", caption ?? "Table");
  return scroll;
}

// Placeholders of the redaction are marked, so that a reader sees what was taken out; so is what was searched.
const prose = (value, needles = []) => reachable(element("pre", "", ...pieces(value, needles)));

// What is tall scrolls by itself, so the keyboard has to reach it.
function reachable(shown) {
  const text = shown.textContent;
  if (text.length / 40 + text.split("\n").length > 20) shown.tabIndex = 0;
  return shown;
}

const pieces = (value, needles) => value.split(/(<(?:SECRET:[^<>]{1,60}|EMAIL:[0-9a-f]+)>)/).flatMap((part, place) =>
  (place % 2 ? [element("mark", "taken", part)] : marked(part, needles)));

// What an agent writes is Markdown. HTML in it stays text, and so do links and pictures, with where they lead.
const TAGS = ["p", "strong", "em", "s", "code", "pre", "ul", "ol", "li", "blockquote", "hr", "br", "table", "thead", "tbody", "tr", "th", "td"];
let renderer;

function rendered(value, needles) {
  if (!renderer) {
    renderer = markdownit({ html: false }).disable(["link", "image", "autolink", "reference"]);
    renderer.renderer.rules.heading_open = () => "<p><strong>"; // the page has headings of its own
    renderer.renderer.rules.heading_close = () => "</strong></p>";
  }
  const safe = DOMPurify.sanitize(renderer.render(value), { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["start"], RETURN_DOM_FRAGMENT: true });
  const texts = document.createTreeWalker(safe, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) found.push(texts.currentNode);
  for (const text of found) text.replaceWith(...pieces(text.data, needles));
  for (const wide of safe.querySelectorAll("pre, table")) wide.tabIndex = 0; // they may scroll
  return safe;
}

// A long session has thousands of texts: each is rendered when it comes near the screen.
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    target.classList.remove("raw");
    target.replaceChildren(rendered(target.textContent, []));
  }
}, { rootMargin: "800px" });

function markdown(value, needles = []) {
  if (needles.length) return element("div", "markdown", rendered(value, needles));
  const made = element("div", "markdown raw", value);
  near.observe(made);
  return made;
}

// Libraries are loaded when they are first used.
const library = (name, global) => (window[global] ? null : load(`library ${name}`, () => add(`${name}.min.js`)));
const forMarkdown = () => Promise.all([library("markdown-it.umd", "markdownit"), library("purify", "DOMPurify")]);

function marked(text, needles) {
  const parts = [];
  const small = flatOf(text);
  if (!needles.length) return [text];
  for (let from = 0; from < text.length; ) {
    let at = -1, found = "";
    for (const needle of needles) {
      const place = small.indexOf(needle, from);
      if (place >= 0 && (at < 0 || place < at)) [at, found] = [place, needle];
    }
    if (at < 0) { parts.push(text.slice(from)); break; }
    parts.push(text.slice(from, at), element("mark", "", text.slice(at, at + found.length)));
    from = at + found.length;
  }
  return parts;
}

// Data files are scripts that call this, because a page from disk may read no other file.
const arrived = new Map();
const waiting = new Map();
window.lookData = (name, value) => arrived.set(name, value);

function add(source) {
  return new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = source;
    script.onload = () => { script.remove(); done(); };
    script.onerror = () => failed(new Error(`${source} is missing: was the whole folder copied?`));
    document.head.append(script);
  });
}

function load(name, from = () => loaded(name)) {
  if (!waiting.has(name)) waiting.set(name, from());
  return waiting.get(name);
}

async function loaded(name) {
  await add(`data/${name}.js`);
  const value = arrived.get(name);
  arrived.delete(name);
  return typeof value === "string" ? unpacked(value) : value;
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// `#/tab/more/more?name=value`: each view has an address, so that Back and links work.
function address() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const parts = path.split("/").slice(1).map(decodeURIComponent);
  return { tab: parts[0] || "overview", rest: parts.slice(1), query: new URLSearchParams(query) };
}

function addressOf(tab, rest = [], query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value));
  const path = [tab, ...rest].map(encodeURIComponent).join("/");
  return `#/${path}${asked.size ? `?${asked}` : ""}`;
}

const sessionAddress = (session, state, query) =>
  addressOf("session", [session.id, ...(state ? [state] : [])], query);

function selector(label, options, value, act) {
  const chosen = element("select");
  chosen.setAttribute("aria-label", label);
  for (const [key, told] of options) chosen.append(new Option(told, key));
  chosen.value = value;
  chosen.addEventListener("change", () => act(chosen.value));
  return element("label", "field", `${label} `, chosen);
}

const keys = {}; // of the tab that is shown
const tabs = [];
