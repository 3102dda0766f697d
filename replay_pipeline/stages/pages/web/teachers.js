tabs.push(["teachers", "Teachers", showTeachers]);

async function showTeachers(main) {
  const [found, overview] = await Promise.all([load("teachers"), load("overview")]);
  const { teachers } = found;
  main.append(element("h2", "", "Which model could I have used?"));
  if (found.played.length) {
    main.append(element("p", "warning", `${found.played.join(", ")}: these answers were made up in a rehearsal. They show what the page looks like, and nothing about a model.`));
  }
  if (found.verdicts.length) {
    const said = element("div", "card wide");
    for (const verdict of found.verdicts) said.append(element("p", "", verdict.words, element("span", "sub", verdict.at)));
    main.append(said);
    const newest = found.verdicts.filter((each, n) => found.verdicts.findIndex((other) => other.model === each.model) === n);
    const rows = newest.map((each) => ({ name: each.model, ...each }));
    const again = newest.map((each) => each.again).filter(Boolean).sort((one, other) => other.n - one.n);
    if (again.length) rows.unshift({ name: "the agent, asked again", ...again[0], isCeiling: true });
    const picture = element("section", "card wide", element("h2", "", "Right of 100 decisions, beside the agent"));
    main.append(picture);
    chart(picture, rows.map((row) => `${row.name}: ${points100(row.difference)} (${points100(row.low)} to ${points100(row.high)})`).join("; "),
      intervals(rows, "more or fewer right, of 100"));
    main.append(element("p", "note", `A model could do the work if its bar begins right of ${points100(-newest[0].margin)}. The agent, asked again, is the ceiling: nobody agrees with it more than it does itself.`));
  } else {
    main.append(element("p", "note", "replay-pipeline verdict MODEL says in one sentence whether a model could have done this work."));
  }
  if (!teachers.length) return;
  main.append(element("p", "note", `${found.caveat} Intervals are 95 % (Wilson).`));
  const newest = overview.total.last;
  const sums = (days) => {
    const since = dayAfter(newest, 1 - days);
    return overview.days.filter((row) => row[DAY] >= since).reduce((sum, row) => sum + (row[USD] ?? 0), 0);
  };
  const month = newest ? sums(30) : 0;
  const ratio = (t) => (t.agent_usd_per_decision ? t.usd_per_decision / t.agent_usd_per_decision : null);
  main.append(element("div", "card wide", table([
    ["model", (t) => element("span", "", element("b", "", t.teacher), element("span", "sub", t.model))],
    ["alike", (t) => percent(t.share_alike), "n"],
    ["$ per 100", (t) => fine(100 * t.usd_per_decision), "n"],
    ["the agent's", (t) => (t.agent_usd_per_decision === null ? "no price" : fine(100 * t.agent_usd_per_decision)), "n"],
    ["last 30 days with it", (t) => (ratio(t) === null ? "–" : dollars(month * ratio(t))), "n"],
    ["answers", (t) => number.format(t.n), "n"],
    ["interval", (t) => `${Math.round(100 * t.interval[0])}–${Math.round(100 * t.interval[1])} %`, "n"],
    ["same", (t) => number.format(t.n_same), "n"], ["equal", (t) => number.format(t.n_equal), "n"],
    ["another", (t) => number.format(t.n_other), "n"], ["no action", (t) => number.format(t.n_invalid + t.n_failed + t.n_looked), "n"],
    ["right, by the votes", (t) => percent(t.accuracy), "n"],
    ["median s", (t) => t.latency_s_median ?? "–", "n"], ["95 % s", (t) => t.latency_s_p95 ?? "–", "n"],
  ], teachers, "Models by how often they did what the agent did")));
  main.append(element("p", "note", `“$ per 100” is what 100 decisions cost here; “the agent's” is what the recorded turns of the same decisions cost at list prices of ${overview.prices_of}. “Last 30 days with it” is what your sessions cost in the 30 days to ${newest} (${dollars(month)}), by the ratio of the two. A teacher reads the whole prompt at each decision, less what its provider’s cache serves.`));
  const picture = element("section", "card wide", element("h2", "", "Dollars against decisions taken alike"));
  main.append(picture);
  const dots = teachers.map((t) => ({ name: t.teacher, x: 100 * t.usd_per_decision, y: t.share_alike }));
  const again = found.agent_alike;
  const agent = again === null ? "the recorded action" : "the agent, asked again";
  if (found.agent_usd_per_decision !== null) dots.push({ name: agent, x: 100 * found.agent_usd_per_decision, y: again ?? 1 });
  chart(picture, `Dollars per 100 decisions against share alike: ${dots.map((d) => `${d.name} ${percent(d.y)} for ${fine(d.x)}`).join("; ")}`,
    points(dots, "US dollars per 100 decisions", "decisions taken alike"), dots.map(({ name }) => name));
  const names = teachers.map((t) => t.teacher);
  for (const [title, rows, filter] of [["By tool of the decision", found.by_tool, "tool"], ["By project", found.by_project, "project"], ["By result of the session", found.by_result, "happened"]]) {
    if (!rows.length) continue;
    main.append(element("section", "card wide", element("h2", "", title), table([
      [filter, (row) => link(row.name, addressOf("sessions", [], { [filter]: row.name === "text" ? "" : row.name }))],
      ["decisions", (row) => number.format(Math.max(...Object.values(row.teachers).map((t) => t.n))), "n"],
      ...names.map((name) => [name, (row) => shareOf(row.teachers[name]), "n"]),
    ], rows, title)));
  }
}

const points100 = (share) => `${share > 0 ? "+" : ""}${Math.round(100 * share)}`;

const shareOf = (t) => (t ? element("span", "", percent(t.share_alike), element("span", "sub", `${Math.round(100 * t.interval[0])}–${Math.round(100 * t.interval[1])} · ${fine(100 * t.usd_per_decision)}`)) : "–");
