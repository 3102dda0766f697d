// One session as a tree: rewinds folded, subagents at their calls, edits as differences, results on
// demand; beside it an outline that says what each request cost and where something went wrong.
const FINE = ["ok", "final_text"];
const EDITED = [["old_string", "new_string"], ["old_str", "new_str"], ["oldString", "newString"]];
const MOST_LINES = 600;
const AT_ONCE_MS = 12; // so that a long session answers to keys while it is drawn

async function showSession(main, { rest: [id, stateId], query }) {
  const sessions = await load("sessions");
  const n = sessions.findIndex((each) => each.id === id);
  if (n < 0) return void main.append(element("p", "empty", "No session has this address."));
  const session = sessions[n];
  const turns = await load(`session-${n}`);
  await forMarkdown();
  const told = session.has_answers ? await load(`answers-${n}`) : { answers: {}, portion: {} };
  const needles = needlesOf(query.get("q") ?? "");
  main.append(sessionHead(session, sessions));
  const known = new Set(turns.map((turn) => turn.i));
  const children = new Map();
  for (const turn of turns) {
    const parent = known.has(turn.parent) ? turn.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(turn);
  }
  const sheet = element("article", "tree");
  const below = sessions.filter((each) => each.parent === session.id).sort((a, b) => (a.first < b.first ? -1 : 1));
  const context = { session, told, needles, children, below: [...below] };
  const body = element("div", "body", sheet);
  main.append(body);
  const go = (turn) => (turn.state ? unfold(sheet, turn.state.state_id) : sheet.querySelector(`[data-turn="${turn.i}"]`)?.scrollIntoView({ block: "start" }));
  if (turns.some((turn) => turn.state)) body.prepend(outline(turns, go));
  const step = (by) => {
    const all = [...sheet.querySelectorAll(".turn.decision")];
    const at = all.findIndex((each) => each.classList.contains("linked"));
    const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by];
    if (next) { history.replaceState(null, "", sessionAddress(session, next.dataset.state, { q: query.get("q") })); point(next); }
  };
  const failed = turns.filter(isFailed);
  let nthFailed = -1;
  keys.j = () => step(1);
  keys.k = () => step(-1);
  keys.n = () => failed.length && go(failed[(nthFailed += 1) % failed.length]);
  scrollTo(0, 0);
  let since = performance.now();
  // Roots are no branches: after a compaction the log begins anew.
  for (const root of children.get(null) ?? []) {
    drawTurn(root, sheet, context);
    for (const _ of drawWays(root.i, sheet, context)) {
      if (performance.now() - since < AT_ONCE_MS) continue;
      await new Promise((ready) => setTimeout(ready));
      since = performance.now();
      if (!main.isConnected) return; // something else is shown meanwhile
    }
  }
  if (stateId) await unfold(sheet, stateId);
  else if (needles.length) {
    const first = sheet.querySelector("mark:not(.taken)");
    for (let up = first?.closest("details"); up; up = up.parentElement.closest("details")) up.open = true;
    first?.scrollIntoView({ block: "center" });
  }
}

function point(turn) {
  document.querySelector(".turn.linked")?.classList.remove("linked");
  turn.classList.add("linked");
  turn.scrollIntoView({ block: "start" });
}

// A decision on a way that was left lies in a folded branch; branches lie in branches.
async function unfold(sheet, stateId) {
  const find = () => [...sheet.querySelectorAll(".turn")].find((each) => each.dataset.state === stateId);
  for (let folded; !find() && (folded = sheet.querySelector("details.branch:not([open])")); ) {
    folded.open = true;
    await new Promise((ready) => setTimeout(ready));
  }
  const turn = find();
  if (turn) point(turn);
}

const isFailed = ({ state }) => state && !FINE.includes(state.outcome);
const isRequest = (turn) => ["user", "queued", "command"].includes(turn.kind) && turn.parts.some(([who]) => who === "user");

// A command as it was typed; other words as they are.
function typed(text) {
  const [, name, more] = text.match(/<command-name>(.*?)<\/command-name>(?:[^]*?<command-args>([^]*?)<\/command-args>)?/) ?? [];
  return name ? `${name} ${more ?? ""}`.trim() : text;
}

// What a person asked for, what came of each request, and how full the context was.
function outline(turns, go) {
  const decisions = turns.filter((turn) => turn.state);
  const rows = [];
  for (const turn of turns) {
    if (isRequest(turn) || turn.kind === "summary") rows.push({ turn, n: 0, usd: 0, failed: [] });
    const row = rows.at(-1);
    if (!row || !turn.state) continue;
    row.n += 1;
    row.usd += turn.usd ?? 0;
    if (isFailed(turn)) row.failed.push(turn);
  }
  const made = element("details", "outline card", element("summary", "", element("b", "", "Outline")));
  made.open = matchMedia("(min-width: 1100px)").matches;
  let usd = 0;
  const sums = decisions.map((turn) => (usd += turn.usd ?? 0));
  if (sums.length) chart(made, `Prompt over ${decisions.length} decisions: at most ${number.format(Math.max(...decisions.map((turn) => turn.context ?? 0)))} tokens; cost ${dollars(usd)}`, contextAndCost(decisions, sums, (place) => go(decisions[place])), ["prompt tokens", "cost so far"]);
  made.append(element("ol", "", ...rows.filter(({ turn, n }) => n || turn.kind !== "command").map(({ turn, n, usd: own, failed }) => {
    const text = turn.kind === "summary" ? "Compaction" : typed(turn.parts.find(([who]) => who === "user")[1]).replace(/<[^<>]{1,40}>/g, " ").trim().replace(/^([^]{89})[^]{2,}$/, "$1…") || "(command)";
    const about = element("span", "sub", [several(n, "decision"), own && dollars(own)].filter(Boolean).join(" · "));
    if (failed.length) about.append(" · ", button(`${failed.length} went wrong`, "jump bad", () => go(failed[0])));
    return element("li", "", button(text, "jump", () => go(turn)), about);
  })));
  return made;
}

const contextAndCost = (decisions, sums, act) => (width, height) => {
  const tokens = decisions.map((turn) => turn.context ?? 0);
  const { drawn, top, bottom, atX, atY, atOther } = framed(width, height, counted(decisions.length, width / 90),
    rounds(0, Math.max(...tokens), height / 45, compact.format), rounds(0, sums.at(-1), height / 45, (usd) => dollars(usd)));
  const told = (turn, n) => `decision ${n + 1}: ${number.format(tokens[n])} prompt tokens, cost so far ${dollars(sums[n])}${isFailed(turn) ? `, ${words(turn.state.outcome)}` : ""}`;
  return [
    ...drawn, curved(tokens.map((each, n) => [atX(n + 1), atY(each)]), 0), curved(sums.map((each, n) => [atX(n + 1), atOther(each)]), 1),
    ...decisions.flatMap((turn, n) => (isFailed(turn) ? [svg("circle", { cx: atX(n + 1), cy: atY(tokens[n]), r: 3, fill: "var(--red)" })] : [])),
    ...decisions.map((turn, n) => mark("rect", { x: atX(n + 0.5), y: top, width: atX(1) - atX(0), height: bottom - top, fill: "transparent" }, told(turn, n), () => act(n))),
  ];
};

// What the whole conversation costs, with its subagents, resumed and forked sessions, is told first.
function cost(session) {
  const own = dollars(session.cost_usd), all = dollars(session.total_usd);
  return own === all ? all : `${all} in all, ${own} of it here`;
}

function sessionHead(session, sessions) {
  const head = element("section", "head", element("h2", "", session.title));
  const facts = [
    session.project, session.models.join(", "), moment(session.first), duration(session.seconds),
    several(session.n_states, "decision"), wentWrong(session),
    session.n_branches && several(session.n_branches, "rewind"),
    session.n_compactions && several(session.n_compactions, "compaction"), session.result, cost(session), session.id,
  ];
  head.append(element("p", "note", facts.filter(Boolean).join(" · ")));
  const parent = sessions.find((each) => each.id === session.parent);
  if (parent) head.append(element("p", "", "A subagent of ", link(parent.title, sessionAddress(parent))));
  const others = sessions.filter((each) => each.conversation === session.conversation && each !== session);
  if (others.length) {
    const subagents = others.filter((each) => each.parent).length, more = others.length - subagents;
    const told = [subagents && several(subagents, "subagent"), more && several(more, "other session")].filter(Boolean).join(" and ");
    head.append(element("details", "", element("summary", "", `The conversation has ${told}`),
      element("ol", "ranked", ...others.sort((a, b) => b.cost_usd - a.cost_usd).map((each) =>
        element("li", "", element("span", "n", dollars(each.cost_usd)), link(each.title, sessionAddress(each)))))));
  }
  return head;
}

// A rewind leaves two ways on from one turn. The last one is what the session went on with; the
// others are folded, and drawn when they are opened.
function* drawWays(from, into, context) {
  let ways = context.children.get(from) ?? [];
  while (ways.length) {
    const next = ways.at(-1);
    for (const other of ways.slice(0, -1)) into.append(branch(other, context));
    drawTurn(next, into, context);
    yield next;
    ways = context.children.get(next.i) ?? [];
  }
}

function branch(first, context) {
  const folded = element("details", "branch", element("summary", "", `Another way from here, left by a rewind or in parallel: #${first.i}`));
  folded.addEventListener("toggle", () => {
    if (!folded.open || folded.childElementCount !== 1) return;
    drawTurn(first, folded, context);
    Array.from(drawWays(first.i, folded, context));
  });
  return folded;
}

function drawTurn(turn, into, context) {
  if (turn.kind === "summary" || turn.kind === "microcompact") {
    into.append(element("div", "compaction", "Compaction: what came before was cleared or summed up"));
  }
  into.append(turnShown(turn, context));
}

function turnShown(turn, context) {
  const { state } = turn;
  const failed = isFailed(turn);
  const made = element("section", `turn ${turn.kind}${state ? " decision" : ""}${failed ? " failed" : ""}`);
  const about = [turn.model ?? words(turn.kind), turn.at && moment(turn.at), turn.usd && fine(turn.usd)];
  const what = element("div", "what", about.filter(Boolean).join(" · "));
  if (state) {
    made.dataset.state = state.state_id;
    const outcome = element("b", failed ? "bad" : "", [words(state.outcome), state.error_kind && words(state.error_kind)].filter(Boolean).join(": "));
    what.append(" · ", outcome, " · ", link(`decision ${state.state_id.slice(0, 10)}`, sessionAddress(context.session, state.state_id)));
    if (state.state_id in context.told.portion) {
      what.append(" · ", link("its pair", addressOf("pairs", [context.told.portion[state.state_id], state.state_id])));
    }
  }
  made.dataset.turn = turn.i;
  made.append(what);
  if (turn.thinking) made.append(folded("Thinking", turn.thinking, context.needles));
  for (const part of turn.parts) made.append(turn.kind === "meta" ? folded("Put in by the client", part[1], context.needles) : partShown(part, context.needles, turn.kind), ...subagentOf(part, context.below));
  if (state?.hint) made.append(element("div", "hint", element("h3", "", "What came after told what was wrong"), prose(state.hint, context.needles)));
  const answers = state && context.told.answers[state.state_id];
  if (answers) made.append(answersShown(answers));
  return made;
}

// A subagent is found by what it was asked for: the log of the call names no session.
function subagentOf([who, , values], below) {
  const prompt = who === "call" && values.find(([key]) => key === "prompt")?.[1];
  const words = prompt ? prompt.trim().split(/\s+/).join(" ") : "";
  const at = words ? below.findIndex(({ title }) => title === words || (title.endsWith("…") && words.startsWith(title.slice(0, -1)))) : -1;
  if (at < 0) return [];
  const [found] = below.splice(at, 1);
  return [element("p", "note", "→ ", link(`its subagent: ${several(found.n_states, "decision")}, ${dollars(found.cost_usd)}`, sessionAddress(found)), found.n_errors ? `, ${several(found.n_errors, "error")}` : "")];
}

function folded(title, text, needles) {
  const first = text.trimStart().split("\n", 1)[0].slice(0, 110);
  return element("details", "", element("summary", "", element("b", "", title), ` ${first}`), prose(text, needles));
}

function partShown(part, needles, kind = "assistant") {
  const [who, text] = part;
  if (who === "call") return callShown(part, needles);
  if (who === "tool") return folded("Result", text, needles);
  const made = element("div", `said ${who}`);
  if (who !== "assistant" && who !== kind) made.append(element("h3", "", who));
  made.append(who === "assistant" ? markdown(text, needles) : prose(typed(text), needles));
  return made;
}

function callShown([, name, values], needles) {
  const made = element("div", "call", element("h3", "", name));
  const found = Object.fromEntries(values);
  const edit = EDITED.find(([before, after]) => before in found && after in found);
  for (const [key, value] of values) {
    if (edit?.includes(key)) continue;
    if (value.includes("\n")) made.append(element("div", "key", key), prose(value, needles));
    else made.append(element("div", "value", element("span", "key", key), " ", ...marked(value, needles)));
  }
  if (edit) made.append(reachable(difference(found[edit[0]], found[edit[1]])));
  return made;
}

// The longest common lines, by the book: edits are short, and longer ones are shown one after the other.
function difference(before, after) {
  const [a, b] = [before.split("\n"), after.split("\n")];
  const shown = element("pre", "difference");
  const put = (sign, line) => shown.append(element("span", { "-": "out", "+": "in", " ": "" }[sign], `${sign} ${line}\n`));
  if (a.length + b.length > MOST_LINES) {
    a.forEach((line) => put("-", line));
    b.forEach((line) => put("+", line));
    return shown;
  }
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i][j] = a[i] === b[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  for (let i = 0, j = 0; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i] === b[j]) { put(" ", a[i]); i++; j++; }
    else if (i < a.length && (j >= b.length || longest[i + 1][j] >= longest[i][j + 1])) put("-", a[i++]);
    else put("+", b[j++]);
  }
  return shown;
}

const VERDICTS = { same: "the same action", equal: "an equal action", other: "another action", invalid: "no action that can run", failed: "no answer", looked: "only looked, so it has no vote" };

function answersShown(answers) {
  const alike = answers.filter((each) => each.verdict === "same" || each.verdict === "equal").length;
  const acted = answers.filter((each) => each.verdict !== "looked").length;
  const made = element("details", "answers", element("summary", "", element("b", "", "Teachers"), ` ${alike} of ${acted} would have done the same`));
  for (const each of answers) {
    made.append(element("h3", each.verdict, `${each.teacher}: ${VERDICTS[each.verdict]} · ${fine(each.usd)} · ${each.latency_s} s`));
    if (each.looks) {
      const first = element("details", "first", element("summary", "", `looked or kept notes first: ${several(each.looks.length / 2, "call")}`));
      for (const part of each.looks) first.append(partShown(part, []));
      made.append(first);
    }
    if (each.why) made.append(prose(each.why));
    for (const part of each.parts) made.append(partShown(part, []));
  }
  return made;
}
