tabs.push(["overview", "Overview", showOverview]);
const DAY = 0, MODEL = 1, PROJECT = 2, USD = 8;
const MOST_SERIES = 7;

async function showOverview(main) {
  const [{ total, ...figures }, sessions] = await Promise.all([load("overview"), load("sessions")]);
  const { tokens } = figures;
  const prompt = tokens.input + tokens.cache_write + tokens.cache_write_1h + tokens.cache_read;
  const per100 = (n) => (total.states ? (100 * n / total.states).toFixed(1) : "–");
  main.append(element("section", "figures",
    figure(dollars(figures.cost_usd), `at list prices of ${figures.prices_of}`, "#/sessions?sort=-cost"),
    figure(number.format(total.sessions), `sessions, ${number.format(total.subagents)} of them of subagents`, "#/sessions"),
    figure(number.format(total.states), `decisions, ${total.first ?? "?"} to ${total.last ?? "?"}`, "#/sessions?sort=-decisions"),
    figure(percent(prompt ? tokens.cache_read / prompt : null), "of prompt tokens read from cache"),
    figure(per100(total.errors), `errors per 100 decisions, and ${per100(total.interruptions)} interruptions`, "#/sessions?sort=-errors"),
  ));
  if (figures.models_without_price.length) {
    main.append(element("p", "note", `Without a list price, so not in the dollars: ${figures.models_without_price.join(", ")}.`));
  }
  const costs = element("section", "card wide");
  const place = element("div");
  const chosen = { per: figures.days.length > 400 ? "week" : "day", by: "model" };
  const show = (more) => {
    Object.assign(chosen, more);
    place.replaceChildren();
    costPer(place, figures.days, chosen);
  };
  costs.append(element("div", "bar", element("h2", "", "Cost"), element("div", "filters",
    selector("per", ["day", "week", "month"].map((name) => [name, name]), chosen.per, (per) => show({ per })),
    selector("by", [["model", "model"], ["project", "project"]], chosen.by, (by) => show({ by })))), place);
  main.append(costs);
  show({});
  main.append(element("div", "cards",
    card("The ten dearest conversations", ranked(sessions.filter((s) => s.has_bill), (s) => s.total_usd, (s) => dollars(s.total_usd))),
    card("The ten worst sessions", ranked(sessions, (s) => s.n_errors + s.n_interrupted, wentWrong)),
    card("Projects", table([
      ["project", (p) => link(p.name, addressOf("sessions", [], { project: p.name }))],
      ["sessions", (p) => number.format(p.sessions), "n"], ["cost", (p) => dollars(p.cost_usd), "n"],
    ], figures.projects, "Projects by cost")),
    card("Models", table([
      ["model", (m) => link(m.model, addressOf("sessions", [], { model: m.model }))],
      ["tokens", (m) => compact.format(m.tokens), "n"], ["cost", (m) => dollars(m.cost_usd), "n"],
    ], figures.models, "Models")),
    card("Tools that fail most", table([
      ["tool", ([name]) => link(name, addressOf("sessions", [], { tool: name }))],
      ["decisions", ([, [n]]) => number.format(n), "n"], ["failed", ([, [, failed]]) => number.format(failed), "n"],
      ["share", ([, [n, failed]]) => percent(failed / n, 1), "n"],
    ], Object.entries(figures.tools).sort(([, a], [, b]) => b[1] - a[1] || b[0] - a[0]).slice(0, 12), "Tools by failed decisions")),
    card("Tokens by kind", counts(Object.fromEntries(Object.entries(tokens).map(([name, n]) => [TOKEN_WORDS[name] ?? name, n])), "Tokens by kind")),
    card("Outcomes of decisions", counts(figures.outcomes, "Outcomes", (name) => addressOf("sessions", [], { happened: `=${name}` }))),
    figures.read !== undefined || figures.skipped ? more(figures) : null,
  ));
}

const TOKEN_WORDS = {
  input: "fresh input", cache_write: "written to cache for 5 minutes", cache_write_1h: "written to cache for an hour",
  cache_read: "read from cache", output: "output",
};

function figure(value, told, address) {
  const made = element("div", "figure", element("strong", "", value), element("span", "", told));
  return address ? element("a", "", made) && Object.assign(link(made, address, "plain")) : made;
}

function card(title, ...content) {
  return element("section", "card", element("h2", "", title), ...content);
}

const counts = (found, caption, address) => table(
  [["kind", ([name]) => (address ? link(words(name), address(name)) : words(name))], ["number", ([, n]) => number.format(n), "n"]],
  Object.entries(found).sort(([, a], [, b]) => b - a), caption);

function ranked(sessions, rank, told) {
  const best = sessions.filter((s) => rank(s) > 0).sort((a, b) => rank(b) - rank(a)).slice(0, 10);
  return best.length ? element("ol", "ranked", ...best.map((s) =>
    element("li", "", link(s.title, sessionAddress(s)), element("span", "n", told(s))))) : element("p", "", "none");
}

function more(figures) {
  const details = element("details", "card", element("summary", "", "How it was read"));
  const shares = Object.entries(figures.fidelity ?? {}).map(([client, f]) => [client, f]);
  if (shares.length) details.append(table([
    ["client", ([name]) => name], ["decisions", ([, f]) => number.format(f.n_states), "n"],
    ["prefix within 10 %", ([, f]) => percent(f.share_within_10_percent, 1), "n"]], shares, "Prompts put together against what was recorded"));
  for (const [title, found] of [["Redacted", figures.redactions], ["Rows left out", figures.skipped], ["Files left out", figures.skipped_files]]) {
    if (found && Object.keys(found).length) details.append(element("h3", "", title), counts(found, title));
  }
  return details;
}

// A bar leads to the sessions that it adds up; the same sums stand in a table, for the keyboard.
function costPer(place, days, { per, by }) {
  const column = by === "model" ? MODEL : PROJECT;
  const sums = new Map(), totals = new Map();
  const all = [...new Set(allDays(days.map((row) => row[DAY]).filter(Boolean)).map(STARTS[per]))];
  const at = new Map(all.map((start, n) => [start, n]));
  for (const row of days) sums.set(row[column], (sums.get(row[column]) ?? 0) + (row[USD] ?? 0));
  const named = [...sums].sort(([, a], [, b]) => b - a).slice(0, MOST_SERIES).map(([name]) => name);
  const series = [...named, ...(sums.size > named.length ? ["others"] : [])].map((name) => ({ name, values: all.map(() => 0) }));
  for (const row of days.filter((each) => each[DAY])) {
    const start = STARTS[per](row[DAY]), part = named.indexOf(row[column]);
    series[part < 0 ? series.length - 1 : part].values[at.get(start)] += row[USD] ?? 0;
    totals.set(start, (totals.get(start) ?? 0) + (row[USD] ?? 0));
  }
  const sessionsOf = (start, name) => addressOf("sessions", [], { days: `${start}..${ENDS[per](start)}`, [by]: name, sort: "-cost" });
  const act = (n, part) => { location.hash = sessionsOf(all[n], named[part]); };
  chart(place, `Cost per ${per} by ${by}: ${named.map((name) => `${name} ${dollars(sums.get(name))}`).join(", ")}`, stacked(all, series, (usd) => dollars(usd), act), series.map(({ name }) => name));
  place.append(element("details", "", element("summary", "", `The same as a table, with the sessions of each ${per}`), table([
    [per === "week" ? "week from" : per, (start) => link(start, sessionsOf(start))], ["cost", (start) => dollars(totals.get(start)), "n"],
  ], [...totals.keys()].sort().reverse(), `Cost per ${per}`)));
}

const STARTS = { day: (day) => day, week: (day) => dayAfter(day, -((new Date(day).getUTCDay() + 6) % 7)), month: (day) => `${day.slice(0, 7)}-01` };
const ENDS = {
  day: (day) => day, week: (day) => dayAfter(day, 6),
  month: (day) => dayAfter(STARTS.month(dayAfter(day, 31)), -1),
};

function allDays(found) {
  if (!found.length) return [];
  const days = [];
  const last = Date.parse(found.reduce((a, b) => (a > b ? a : b)));
  const first = Date.parse(found.reduce((a, b) => (a < b ? a : b)));
  const step = 86_400_000;
  if ((last - first) / step > 400) return [...new Set(found)].sort();
  for (let day = first; day <= last; day += step) days.push(new Date(day).toISOString().slice(0, 10));
  return days;
}
