"use strict";
// All session text goes into the page through textContent; nothing here builds HTML from data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { overview, sessions, pieces } = data;
  const $ = (id) => document.getElementById(id);
  const number = new Intl.NumberFormat("en");
  const dollars = (usd) => (usd === null || usd === undefined ? "no price" : `$${usd.toFixed(2)}`);
  const words = (text) => String(text).replaceAll("_", " ");

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined && text !== null) made.textContent = text;
    return made;
  }

  function link(label, address) {
    const made = element("a", "", label);
    made.href = address;
    return made;
  }

  function card(title, rows) {
    const made = element("div", "card");
    made.append(element("h3", "", title));
    for (const [name, value] of rows) {
      const row = element("div");
      row.append(element("span", "", name), element("span", "", value));
      made.append(row);
    }
    if (!rows.length) made.append(element("p", "", "none"));
    return made;
  }

  const counted = (counts, told = words) =>
    Object.entries(counts).map(([name, n]) => [told(name), number.format(n)]);

  function showOverview() {
    const { total } = overview;
    $("totals").textContent =
      `${total.sessions} sessions (${total.subagents} of subagents), ${total.first} to ${total.last}: ` +
      `${number.format(total.states)} decisions, ${dollars(overview.cost_usd)} at list prices of ` +
      `${overview.prices_of}. Redacted; this page loads nothing and sends nothing.`;
    $("overview").append(
      card("Projects", overview.projects.map((p) => [p.name, `${p.sessions} · ${dollars(p.cost_usd)}`])),
      card("Models", overview.models.map((m) => [m.model, `${number.format(m.tokens)} tokens · ${dollars(m.cost_usd)}`])),
      card("Tokens", counted(overview.tokens)),
      card("Outcomes", counted(overview.outcomes)),
      card("Error kinds", counted(overview.error_kinds)),
      card("Tools", counted(overview.tools, String)),
      card("Prefixes within 10 % of what was recorded", Object.entries(overview.fidelity).map(
        ([client, f]) => [client, `${(100 * f.share_within_10_percent).toFixed(1)} % of ${f.n_states}`])),
      card("Redacted", counted(overview.redactions)),
      card("Skipped", [...counted(overview.skipped), ...counted(overview.skipped_files)]),
    );
    const replay = card("Replay", []);
    replay.lastChild.textContent = overview.replay.words;
    $("overview").append(replay);
  }

  const columns = {
    session: (s) => s.id,
    project: (s) => s.project,
    began: (s) => (s.first ?? "").replace("T", " ").slice(0, 16),
    models: (s) => s.models.join(", "),
    turns: (s) => s.n_turns,
    decisions: (s) => s.n_states,
    failed: (s) => s.n_failed,
    branches: (s) => s.n_branches,
    compactions: (s) => s.n_compactions,
    hints: (s) => s.n_hints,
    tokens: (s) => number.format(s.tokens),
    cost: (s) => dollars(s.cost_usd),
  };

  function openButton(session, label) {
    const button = element("button", "", label);
    button.addEventListener("click", () => show(session));
    return button;
  }

  function showSessions() {
    const wanted = $("search").value.toLowerCase();
    const shown = sessions.filter((s) =>
      [s.id, s.project, s.agent, ...s.models].join("\n").toLowerCase().includes(wanted));
    $("n-shown").textContent = `${shown.length} of ${sessions.length}`;
    const rows = shown.map((session) => {
      const row = element("tr");
      for (const [name, value] of Object.entries(columns)) {
        const cell = element("td");
        if (name === "session") cell.append(openButton(session, value(session)));
        else cell.textContent = value(session);
        row.append(cell);
      }
      return row;
    });
    document.querySelector("#sessions tbody").replaceChildren(...rows);
  }

  async function turnsOf(session) {
    const packed = Uint8Array.from(atob(pieces[sessions.indexOf(session)]), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  // Placeholders of the redaction, so that a reader sees what was taken out.
  function text(value) {
    const shown = element("pre");
    for (const [place, part] of value.split(/(<(?:SECRET:[^<>]{1,60}|EMAIL:[0-9a-f]+)>)/).entries()) {
      shown.append(place % 2 ? element("mark", "", part) : part);
    }
    return shown;
  }

  function drawn(turn) {
    const { state } = turn;
    const failed = state && !["ok", "final_text"].includes(state.outcome);
    const made = element("div", `turn${state ? " decision" : ""}${failed ? " failed" : ""}`);
    const about = [`#${turn.i}`, words(turn.kind), turn.model, turn.at?.replace("T", " ")];
    if (state) {
      made.id = state.state_id;
      about.push(`decision ${state.state_id}`, words(state.outcome), state.error_kind && words(state.error_kind));
      if (state.fidelity !== undefined) about.push(`fidelity ${state.fidelity.toFixed(2)}`);
    }
    const what = element("div", "what", about.filter(Boolean).join(" · "));
    if (state && data.review) {
      what.append(" · ", link("its pair", `${data.review}#${encodeURIComponent(state.state_id)}`));
    }
    made.append(what);
    if (turn.thinking) {
      const thought = element("details");
      thought.append(element("summary", "", "thinking"), text(turn.thinking));
      made.append(thought);
    }
    for (const [who, said] of turn.parts) made.append(element("h3", "", who), text(said));
    if (state?.hint) {
      const hint = element("div", "hint");
      hint.append(element("h3", "", "hint: what came after told what was wrong"), text(state.hint));
      made.append(hint);
    }
    return made;
  }

  // A rewind leaves two ways on from one turn. The last one is what the session went on with; the
  // others are folded, and drawn when they are opened.
  function draw(children, parent, into) {
    let ways = children.get(parent) ?? [];
    while (ways.length) {
      const next = ways.at(-1);
      for (const other of ways.slice(0, -1)) into.append(branch(children, other));
      drawOne(next, into);
      ways = children.get(next.i) ?? [];
    }
  }

  function drawOne(turn, into) {
    if (turn.kind === "summary" || turn.kind === "microcompact") {
      into.append(element("div", "compaction", "compaction: what came before was cleared or summed up"));
    }
    into.append(drawn(turn));
  }

  function branch(children, first) {
    const folded = element("details", "branch");
    folded.append(element("summary", "", `another way from here, left by a rewind or in parallel: #${first.i}`));
    folded.addEventListener("toggle", () => {
      if (folded.open && folded.childElementCount === 1) {
        drawOne(first, folded);
        draw(children, first.i, folded);
      }
    });
    return folded;
  }

  // `#SESSION/STATE`, as the review page links here.
  async function followAddress() {
    const [id, stateId] = location.hash.slice(1).split("/").map(decodeURIComponent);
    const session = sessions.find((each) => each.id === id);
    if (!session) return;
    await show(session);
    // A decision on a way that was left lies in a folded branch; branches lie in branches.
    for (let folded; stateId && !document.getElementById(stateId) && (folded = document.querySelector("details.branch:not([open])")); ) {
      folded.open = true;
      await new Promise((drawn) => setTimeout(drawn));
    }
    const turn = stateId && document.getElementById(stateId);
    turn?.classList.add("linked");
    turn?.scrollIntoView();
  }

  async function show(session) {
    const turns = await turnsOf(session);
    const known = new Set(turns.map((turn) => turn.i));
    const children = new Map();
    for (const turn of turns) {
      const parent = known.has(turn.parent) ? turn.parent : null;
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(turn);
    }
    const sheet = element("div");
    sheet.append(element("h2", "", `${session.project} · ${session.id}`));
    const parent = sessions.find((each) => each.id === session.parent);
    if (parent) {
      const line = element("p", "", "a subagent of ");
      line.append(openButton(parent, parent.id));
      sheet.append(line);
    }
    for (const each of sessions.filter((other) => other.parent === session.id)) {
      const line = element("p", "", "subagent: ");
      line.append(openButton(each, each.id));
      sheet.append(line);
    }
    // Roots are no branches: after a compaction the log begins anew.
    for (const root of children.get(null) ?? []) {
      drawOne(root, sheet);
      draw(children, root.i, sheet);
    }
    $("session").replaceChildren(sheet);
    $("session").scrollIntoView();
  }

  document.querySelector("#sessions thead tr").append(...Object.keys(columns).map((name) => element("th", "", name)));
  $("search").addEventListener("input", showSessions);
  addEventListener("hashchange", followAddress);
  showOverview();
  showSessions();
  followAddress();
})();
