tabs.push(["sessions", "Sessions", showSessions]);
const COLUMNS = {
  title: ["Session", (s) => s.title.toLowerCase()],
  date: ["Date", (s) => s.first ?? ""],
  cost: ["Cost", (s, usd) => usd(s)],
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
const PORTION = 40;
const AROUND = 70;
let asked = 0;

async function showSessions(main, { query }) {
  const sessions = await load("sessions");
  const now = Object.fromEntries(query);
  const newest = isoDay(sessions.reduce((last, s) => (s.last > last ? s.last : last), ""));
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
  const happened = { ...HAPPENED };
  for (const name of new Set(sessions.flatMap((s) => Object.keys(s.outcomes)))) happened[`=${name}`] = [`outcome: ${words(name)}`, (s) => name in s.outcomes];
  for (const told of new Set(sessions.map((s) => s.result).filter(Boolean))) happened[told] = [told, (s) => s.result === told];
  const days = daysOf(now.days, newest);
  const dayInput = (label, place) => {
    const input = element("input");
    input.type = "date";
    input.value = days?.[place] ?? "";
    input.addEventListener("change", () => {
      const ends = days ? [...days] : place ? ["0001-01-01", ""] : ["", newest];
      ends[place] = input.value;
      change({ days: input.value && ends[0] <= ends[1] ? ends.join("..") : "" });
    });
    return element("label", "field", `${label} `, input);
  };
  const filters = element("div", "filters",
    element("label", "field grow", "Search ", search),
    selector("Project", options(sessions.map((s) => s.project)), now.project ?? "", (project) => change({ project })),
    selector("Model", options(sessions.flatMap((s) => s.models)), now.model ?? "", (model) => change({ model })),
    selector("Tool", options(sessions.flatMap((s) => Object.keys(s.tools))), now.tool ?? "", (tool) => change({ tool })),
    selector("Outcome", [["", "any"], ...Object.entries(happened).map(([key, [told]]) => [key, told])], now.happened ?? "", (one) => change({ happened: one })),
    selector("Date", [["", "any"], ...Object.entries(PERIODS).map(([n, told]) => [n, `${told}, to ${newest}`]), ...(now.days?.includes("..") ? [[now.days, "as chosen"]] : [])], now.days ?? "", (chosen) => change({ days: chosen })),
    dayInput("From", 0), dayInput("To", 1),
  );
  const status = element("p", "note");
  status.setAttribute("role", "status");
  const place = element("div");
  main.append(filters, status, place);

  // A conversation's row tells its whole cost; with days or a model chosen, each row tells its part of that.
  const usd = days || now.model ? (s) => usdOf(s, days, now.model) : (s) => (s.has_bill ? s.total_usd : s.cost_usd);

  async function fill() {
    const turn = ++asked;
    const needles = needlesOf(now.q ?? "");
    const inText = needles.length ? await sessionsWith(needles) : null;
    if (turn !== asked) return; // something else was typed meanwhile
    const needle = normalized(now.q ?? "").trim();
    const shown = sessions.map((s, n) => [s, n]).filter(([s, n]) =>
      (!now.project || s.project === now.project) && (!now.model || s.models.includes(now.model)) &&
      (!now.tool || now.tool in s.tools) && (!now.happened || happened[now.happened]?.[1](s)) &&
      (!days || isWithin(s, days)) &&
      (!needle || normalized(s.title).includes(needle) || s.id.includes(needle) || inText?.has(n)));
    const sort = now.sort ?? "-date";
    const [name, sign] = sort.startsWith("-") ? [sort.slice(1), -1] : [sort, 1];
    const rank = ([s]) => (COLUMNS[name] ?? COLUMNS.date)[1](s, usd);
    shown.sort((a, b) => sign * (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0));
    const sum = shown.reduce((all, [s]) => all + usdOf(s, days, now.model), 0);
    status.textContent = `${number.format(shown.length)} of ${number.format(sessions.length)} sessions, ${dollars(sum)}${now.model ? ` for ${now.model}` : ""}${days ? ` from ${days.join(" to ")}` : ""}`;
    if (!shown.length) {
      const nothing = element("p", "empty", needle ? `No session has “${now.q}”${Object.keys(now).some((key) => !["q", "sort"].includes(key) && now[key]) ? " with these filters" : ""}. ` : "No session fits these filters. ");
      nothing.append(link("Show all sessions", "#/sessions"));
      return void place.replaceChildren(nothing);
    }
    const body = element("tbody");
    const made = element("table", "sessions", element("thead", "", element("tr", "",
      ...Object.entries(COLUMNS).map(([key, [told]]) => heading(key, told, name, sign, change)))), body);
    made.id = "sessions";
    const rest = button("", "more", () => grow());
    const watcher = new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && grow());
    const snippets = new IntersectionObserver((seen) => {
      for (const { isIntersecting, target } of seen) {
        if (!isIntersecting) continue;
        snippets.unobserve(target);
        addSnippet(target, needles);
      }
    });
    let n = 0;
    const grow = () => {
      for (const [s, place] of shown.slice(n, n + PORTION)) {
        const row = rowOf(s, now.q, usd);
        row.dataset.n = place;
        body.append(row);
        if (inText?.has(place)) snippets.observe(row);
      }
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

// `7` are the last seven days, `2026-01-05..2026-01-11` the days between two.
function daysOf(chosen, newest) {
  if (!chosen || !newest) return null;
  const [from, to] = chosen.split("..");
  return to ? [from, to] : [dayAfter(newest, 1 - Number(from)), newest];
}

const dayAfter = (day, n) => new Date(Date.parse(day) + n * 86_400_000).toISOString().slice(0, 10);

const isWithin = (s, [from, to]) => (s.spent.length
  ? s.spent.some(([day]) => from <= day && day <= to) : isoDay(s.last) >= from && isoDay(s.first) <= to);

const usdOf = (s, days, model) => (!days && !model ? s.cost_usd : s.spent
  .filter(([day, name]) => (!days || (days[0] <= day && day <= days[1])) && (!model || name === model))
  .reduce((sum, [, , usd]) => sum + usd, 0));

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

function rowOf(s, q, usd) {
  const bad = [s.n_errors ? `${s.n_errors}` : "", s.n_interrupted ? `${s.n_interrupted} interrupted` : ""].filter(Boolean).join(", ");
  const more = [s.parent ? "subagent" : !s.has_bill && "goes on from another session", s.n_branches && several(s.n_branches, "rewind"), s.n_compactions && several(s.n_compactions, "compaction"), s.has_answers && "teachers answered", s.result].filter(Boolean);
  const title = element("td", "title", link(s.title, sessionAddress(s, null, { q })));
  if (more.length) title.append(element("span", "sub", more.join(" · ")));
  return element("tr", "", title, element("td", "date", moment(s.first)),
    element("td", "cost n", `${dollars(usd(s))}${s.is_priced ? "" : " +"}`), element("td", "project", s.project),
    element("td", "duration n", duration(s.seconds)), element("td", "decisions n", number.format(s.n_states)), element("td", "errors n", bad || "0"));
}

const needlesOf = (text) => (normalized(text).match(/[\p{L}\p{N}]{1,80}/gu) ?? []).filter((each) => each.length > 1 || !/[a-z0-9]/.test(each));

// Which sessions hold all of these, as words or as parts of words: in Chinese or Japanese a sentence is one.
async function sessionsWith(needles) {
  const index = Object.entries(await load("words"));
  const those = needles.map((needle) => new Set(index.filter(([word]) => word.includes(needle)).flatMap(([, found]) => found)));
  return those.reduce((all, some) => new Set([...all].filter((n) => some.has(n))));
}

// What was found, with what is around it: from the text that has most of the words.
async function addSnippet(row, needles) {
  let best = 0, shown = "";
  for (const turn of await load(`session-${row.dataset.n}`)) {
    const parts = turn.parts.flatMap(([who, text, values]) => (who === "call" ? values.map(([, value]) => value) : [text]));
    for (const text of [...parts, turn.thinking ?? ""]) {
      const flat = flatOf(text);
      const places = needles.map((needle) => flat.indexOf(needle)).filter((place) => place >= 0);
      if (places.length <= best) continue;
      best = places.length;
      const from = Math.max(0, Math.min(...places) - AROUND);
      shown = `${from ? "…" : ""}${text.slice(from, from + 3 * AROUND).replace(/\s+/g, " ")}…`;
    }
    if (best === needles.length) break;
  }
  if (shown) row.querySelector(".title").append(element("span", "sub snippet", ...marked(shown, needles)));
}
