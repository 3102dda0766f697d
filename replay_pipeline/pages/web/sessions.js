tabs.push(["sessions", "Sessions", showSessions]);
const COLUMNS = {
  title: ["Session", (s) => s.title.toLowerCase()],
  date: ["Date", (s) => s.first ?? ""],
  cost: ["Cost", (s) => (s.parent ? s.cost_usd : s.total_usd)],
  project: ["Project", (s) => s.project.toLowerCase()],
  duration: ["Duration", (s) => s.seconds ?? 0],
  decisions: ["Decisions", (s) => s.n_states],
  errors: ["Errors", (s) => s.n_errors + s.n_interrupted],
};
const HAPPENED = {
  error: ["had an error", (s) => s.n_errors > 0],
  interrupted: ["was interrupted", (s) => s.n_interrupted > 0],
  rewound: ["was rewound", (s) => s.n_branches > 0],
  compacted: ["was compacted", (s) => s.n_compactions > 0],
  subagent: ["is of a subagent", (s) => s.parent !== null],
  fine: ["nothing went wrong", (s) => s.n_errors + s.n_interrupted === 0],
};
const PERIODS = { 1: "last day", 7: "last 7 days", 30: "last 30 days", 90: "last 90 days" };
const PORTION = 100;
let asked = 0;

async function showSessions(main, { query }) {
  const sessions = await load("sessions");
  const now = Object.fromEntries(query);
  const newest = sessions.reduce((last, s) => (s.last > last ? s.last : last), "");
  const change = (more, isTyped) => {
    Object.assign(now, more);
    const next = addressOf("sessions", [], now);
    if (isTyped) { history.replaceState(null, "", next); fill(); }
    else location.hash = next;
  };
  const options = (values) => [["", "any"], ...[...new Set(values)].sort().map((v) => [v, v])];
  const search = element("input");
  search.type = "search";
  search.id = "search";
  search.placeholder = "in titles and in all text";
  search.autocomplete = "off";
  search.value = now.q ?? "";
  search.addEventListener("input", () => change({ q: search.value }, true));
  const tools = new Map();
  for (const s of sessions) for (const [name, [n]] of Object.entries(s.tools)) tools.set(name, (tools.get(name) ?? 0) + n);
  const filters = element("div", "filters",
    element("label", "field grow", "Search ", search),
    selector("Project", options(sessions.map((s) => s.project)), now.project ?? "", (project) => change({ project })),
    selector("Model", options(sessions.flatMap((s) => s.models)), now.model ?? "", (model) => change({ model })),
    selector("Tool", options(tools.keys()), now.tool ?? "", (tool) => change({ tool })),
    selector("Outcome", [["", "any"], ...Object.entries(HAPPENED).map(([key, [told]]) => [key, told])], now.happened ?? "", (happened) => change({ happened })),
    selector("Date", [["", "any"], ...Object.entries(PERIODS).map(([n, told]) => [n, `${told}, to ${isoDay(newest)}`])], now.days ?? "", (days) => change({ days })),
  );
  const status = element("p", "note");
  status.setAttribute("role", "status");
  const place = element("div");
  main.append(filters, status, place);

  async function fill() {
    const turn = ++asked;
    const needles = needlesOf(now.q ?? "");
    const inText = needles.length ? await sessionsWith(needles) : null;
    if (turn !== asked) return; // something else was typed meanwhile
    const since = now.days ? new Date(Date.parse(newest) - now.days * 86_400_000).toISOString() : "";
    const needle = (now.q ?? "").trim().toLowerCase();
    const shown = sessions.map((s, n) => [s, n]).filter(([s, n]) =>
      (!now.project || s.project === now.project) && (!now.model || s.models.includes(now.model)) &&
      (!now.tool || now.tool in s.tools) && (!now.happened || HAPPENED[now.happened]?.[1](s)) &&
      (!since || (s.last ?? "") >= since) &&
      (!needle || s.title.toLowerCase().includes(needle) || s.id.includes(needle) || inText?.has(n)));
    const sort = now.sort ?? "-date";
    const [name, sign] = sort.startsWith("-") ? [sort.slice(1), -1] : [sort, 1];
    const rank = (COLUMNS[name] ?? COLUMNS.date)[1];
    shown.sort(([a], [b]) => sign * (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0));
    const usd = shown.reduce((sum, [s]) => sum + s.cost_usd, 0);
    status.textContent = `${number.format(shown.length)} of ${number.format(sessions.length)} sessions, ${dollars(usd)}`;
    const body = element("tbody");
    const made = element("table", "sessions", element("thead", "", element("tr", "",
      ...Object.entries(COLUMNS).map(([key, [told]]) => heading(key, told, name, sign, change)))), body);
    made.id = "sessions";
    const rest = button("", "more", () => grow());
    const watcher = new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && grow());
    let n = 0;
    const grow = () => {
      body.append(...shown.slice(n, n + PORTION).map(([s]) => rowOf(s, now.q)));
      n = Math.min(shown.length, n + PORTION);
      rest.hidden = n >= shown.length;
      rest.textContent = `${number.format(shown.length - n)} more`;
    };
    grow();
    place.replaceChildren(made, rest);
    if (!rest.hidden) watcher.observe(rest);
  }
  await fill();
  keys["/"] = () => search.focus();
}

function heading(key, told, sorted, sign, change) {
  const cell = element("th", ["title", "date", "project"].includes(key) ? key : `${key} n`, button(told, "sort", () => {
    const isText = key === "title" || key === "project";
    const next = key === sorted ? -sign : isText ? 1 : -1;
    change({ sort: `${next < 0 ? "-" : ""}${key}` });
  }));
  cell.scope = "col";
  if (key === sorted) cell.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
  return cell;
}

function rowOf(s, q) {
  const bad = [s.n_errors ? `${s.n_errors}` : "", s.n_interrupted ? `${s.n_interrupted} stopped` : ""].filter(Boolean).join(", ");
  const more = [s.parent && "subagent", s.n_branches && several(s.n_branches, "rewind"), s.n_compactions && several(s.n_compactions, "compaction"), s.has_answers && "answered by teachers"].filter(Boolean);
  const title = element("td", "title", link(s.title, sessionAddress(s, null, { q })));
  if (more.length) title.append(element("span", "sub", more.join(" · ")));
  return element("tr", "", title, element("td", "date", moment(s.first)),
    element("td", "cost n", `${dollars(COLUMNS.cost[1](s))}${s.is_priced ? "" : " +"}`), element("td", "project", s.project),
    element("td", "duration n", duration(s.seconds)), element("td", "decisions n", number.format(s.n_states)), element("td", "errors n", bad || "0"));
}

const needlesOf = (text) => text.toLowerCase().match(/[\p{L}\p{N}]{2,40}/gu) ?? [];

// Which sessions hold all these words, or words that begin so: one or two small files tell.
async function sessionsWith(needles) {
  let found = null;
  for (const needle of needles) {
    const shard = (needle.charCodeAt(0) * 31 + needle.charCodeAt(1)) % 256;
    const index = (await load(`words-${shard}`).catch(() => null)) ?? {};
    const those = new Set();
    for (const word of Object.keys(index)) {
      if (!word.startsWith(needle)) continue;
      let at = 0;
      for (const step of index[word]) those.add((at += step));
    }
    found = found === null ? those : new Set([...found].filter((n) => those.has(n)));
  }
  return found;
}
