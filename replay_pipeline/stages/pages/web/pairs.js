tabs.push(["pairs", "Pairs", showPairs]);
const MARKS_KEY = "replay-pipeline marks";

function storedMarks() {
  try {
    return JSON.parse(localStorage.getItem(MARKS_KEY)) ?? {};
  } catch {
    return {}; // Storage may be off for local files; marks then live as long as the page.
  }
}

const marks = storedMarks();

function storeMarks() {
  try {
    localStorage.setItem(MARKS_KEY, JSON.stringify(marks));
  } catch {
    // See storedMarks.
  }
}

async function showPairs(main, { rest: [wanted = "0", stateId] }) {
  const portions = await load("pairs");
  const nth = Number(wanted) in portions ? Number(wanted) : 0;
  const data = await load(`pairs-${nth}`);
  // Pairs in the order in which a look is worth most, then the states without one.
  const items = [...data.items].sort((a, b) => (b.score ?? -1) - (a.score ?? -1));
  const pairs = items.filter((item) => item.diff);
  buildPairs(main, portions, nth, data);
  const filters = [...main.querySelectorAll("[data-filter]")];
  let shown = items;
  let current = items[0] ?? null;

  const markOf = (item) => marks[item.pair] ?? "unmarked";
  const textOf = (item) => {
    item.text ??= [item.id, item.session, item.hint]
      .concat((item.diff ?? []).flat().flatMap((side) => (side ?? []).map(([text]) => text)))
      .join("\n")
      .toLowerCase();
    return item.text;
  };

  function valuesOf(item, name) {
    if (name === "mark") return [markOf(item)];
    const value = item[name];
    return Array.isArray(value) ? value : value ? [value] : [];
  }

  function fillFilters() {
    for (const select of filters) {
      const name = select.dataset.filter;
      const counts = new Map();
      for (const item of items) {
        for (const value of valuesOf(item, name)) counts.set(value, (counts.get(value) ?? 0) + 1);
      }
      const known = name === "mark" ? ["unmarked", "accept", "reject"] : [...counts.keys()].sort();
      select.append(new Option("any", ""));
      for (const value of known) {
        const label = name === "mark" ? value : `${words(value)} (${counts.get(value)})`;
        select.append(new Option(label, value));
      }
      select.disabled = known.length === 0;
      if (name === "outcome" && counts.has("pair")) select.value = "pair";
    }
  }

  function isShown(item) {
    const needle = $("search").value.trim().toLowerCase();
    return (
      filters.every(
        (select) => !select.value || valuesOf(item, select.dataset.filter).includes(select.value),
      ) && (!needle || textOf(item).includes(needle))
    );
  }

  function applyFilters() {
    shown = items.filter(isShown);
    if (!shown.includes(current)) current = shown[0] ?? null;
    const used = filters.filter((select) => select.value).length + ($("search").value ? 1 : 0);
    $("n-filters").textContent = used ? `(${used} in use)` : "";
    drawList();
    draw();
  }

  function drawList() {
    const nPairs = shown.filter((item) => item.diff).length;
    const others = items.length - pairs.length;
    $("n-shown").textContent = `${nPairs} of ${pairs.length} pairs${others ? `, ${shown.length - nPairs} of ${others} states without one` : ""}`;
    $("list").replaceChildren(
      ...shown.map((item) => {
        const button = element("button");
        button.type = "button";
        button.append(
          element("span", "dot"),
          element("span", "head", item.headline || item.id),
          element("span", "sub", [item.source ?? words(item.outcome), item.level, item.teachers.length ? `${item.n_agreeing} of ${item.n_asked} agree` : null, item.recorded ? words(item.recorded) : null].filter(Boolean).join(" · ")),
        );
        button.addEventListener("click", () => select(item));
        item.button = button;
        drawMark(item);
        const entry = element("li");
        entry.append(button);
        return entry;
      }),
    );
  }

  function drawMark(item) {
    if (!item.button) return;
    const mark = markOf(item);
    item.button.dataset.mark = mark;
    item.button.querySelector(".dot").textContent = { accept: "✓", reject: "✗" }[mark] ?? "·";
  }

  function drawProgress() {
    const marked = pairs.filter((item) => marks[item.pair]).length;
    $("progress").textContent = `${marked} of ${pairs.length} pairs marked`;
  }

  function select(item) {
    current = item;
    draw();
    item?.button?.scrollIntoView({ block: "nearest" });
  }

  function draw() {
    for (const item of shown) {
      item.button?.setAttribute("aria-current", item === current ? "true" : "false");
    }
    const canMark = Boolean(current?.diff);
    for (const kind of ["accept", "reject"]) {
      $(kind).disabled = !canMark;
      $(kind).setAttribute("aria-pressed", canMark && markOf(current) === kind ? "true" : "false");
    }
    const place = shown.indexOf(current);
    $("previous").disabled = place <= 0;
    $("next").disabled = place < 0 || place >= shown.length - 1;
    const detail = $("detail");
    detail.replaceChildren(...(current ? detailOf(current) : [element("p", "empty", "No state fits these filters.")]));
    detail.scrollTop = 0;
    drawProgress();
  }

  const minor = new Set(["outcome", "agent", "rejected side", "session", "teachers"]);

  function chip(name, value) {
    const made = element("span", minor.has(name) ? "chip minor" : "chip", `${name} `);
    made.append(element("b", "", value));
    return made;
  }

  function detailOf(item) {
    const chips = element("div", "chips");
    const facts = {
      outcome: words(item.outcome),
      source: item.source,
      level: item.level,
      agreeing: item.teachers.length ? `${item.n_agreeing} of ${item.n_asked}` : null,
      teachers: item.teachers.join(", "),
      "probability that it is right": item.p_better?.toFixed(2),
      "that chosen is right": item.p_chosen_right?.toFixed(2),
      "that rejected is wrong": item.p_rejected_wrong?.toFixed(2),
      difference: item.differs,
      "the record says": item.recorded ? words(item.recorded) : null,
      agent: item.student,
      "rejected side": item.rejected_source,
      "chosen, tried": item.chosen_trial,
      "rejected, tried": item.rejected_trial,
      session: item.session,
      margin: item.margin,
      evidence: item.evidence?.join(", "),
      doubts: item.doubts?.join(", "),
    };
    for (const [name, value] of Object.entries(facts)) {
      if (value !== null && value !== undefined && value !== "") chips.append(chip(name, value));
    }
    for (const [name, value] of Object.entries(item.facts ?? {})) {
      if (name !== "level") chips.append(chip(words(name), words(value)));
    }
    if (item.session) {
      chips.append(link("see it in its session", addressOf("session", [item.session, item.id]), "chip"));
    }
    const made = [element("h2", "", item.id), chips];
    if (item.request) made.push(note("The user said last", item.request));
    if (item.hint) made.push(note("What went wrong, in the record", item.hint));
    if (item.why) made.push(note("Why this made no pair", item.why));
    if (item.reason) made.push(note("Why the agent's action cannot run", item.reason));
    if (item.diff) made.push(diffOf(item.diff));
    if (item.tried?.rejected || item.tried?.chosen) made.push(triedOf(item.tried));
    if (item.prefix) made.push(prefixOf(item.prefix));
    return made;
  }

  function note(title, text) {
    const made = element("div", "hint");
    made.append(element("strong", "", title), text);
    return made;
  }

  function diffOf(rows) {
    const made = element("div", "diff");
    const titles = element("div", "row titles");
    titles.append(element("div", "cell left", "Rejected"), element("div", "cell right", "Chosen"));
    made.append(titles);
    let block = null;
    for (const [left, right] of rows) {
      const isEqual = left && right && JSON.stringify(left) === JSON.stringify(right);
      const kind = isEqual ? "equal" : "changed";
      if (!block?.classList.contains(kind)) made.append((block = element("div", `block ${kind}`)));
      const row = element("div", "row");
      row.append(cell("left", left), cell("right", right));
      block.append(row);
    }
    return made;
  }

  function triedOf(tried) {
    const made = element("section", "tried");
    made.append(element("h3", "", "What each side did to the files, when it was tried"));
    const sides = element("div", "outcomes");
    for (const [side, title] of [["rejected", "Rejected"], ["chosen", "Chosen"]]) {
      const trial = tried[side];
      const box = element("div", `outcome ${side}`, element("strong", "", `${title}: ${trial?.result ?? "not tried"}`));
      if (trial?.diff) box.append(treeDiffOf(trial.diff));
      else if (trial?.answer) box.append(element("pre", "", trial.answer));
      for (const shown of box.querySelectorAll("pre")) shown.tabIndex = 0; // it may scroll, so the keyboard has to reach it
      sides.append(box);
    }
    made.append(sides);
    return made;
  }

  function treeDiffOf(text) {
    const made = element("pre", "difference");
    for (const line of text.split("\n")) {
      const isName = line.startsWith("+++") || line.startsWith("---");
      const kind = isName ? "" : { "+": "in", "-": "out" }[line[0]] ?? "";
      made.append(element("span", kind, line || " "));
    }
    return made;
  }

  function cell(side, segments) {
    const made = element("div", `cell ${side}${segments ? "" : " none"}`);
    for (const [text, isChanged] of segments ?? []) {
      made.append(isChanged ? element("mark", "", text) : text);
    }
    return made;
  }

  function prefixOf(messages) {
    const made = element("details", "prefix");
    made.append(element("summary", "", `What came before (${messages.length} messages shown)`));
    for (const { role, text } of messages) {
      if (role === "gap") {
        made.append(element("p", "gap", text));
        continue;
      }
      const message = element("div", "message");
      message.append(element("div", "role", role), element("pre", "", text));
      made.append(message);
    }
    return made;
  }

  function step(by) {
    const next = shown[shown.indexOf(current) + by];
    if (next) select(next);
  }

  function mark(kind) {
    if (!current?.diff) return;
    if (kind) marks[current.pair] = kind;
    else delete marks[current.pair];
    storeMarks();
    drawMark(current);
    const place = shown.indexOf(current);
    if (kind && place < shown.length - 1) step(1);
    else draw();
  }

  function exportMarks() {
    const ids = new Set(data.chances ? pairs.map((item) => item.pair) : portions.flatMap((each) => each.ids));
    // With those that count already: the file takes the place of the one before.
    const said = Object.entries(marks).filter(([id]) => ids.has(id));
    const kept = Object.fromEntries(
      [...Object.entries(data.marks ?? {}), ...said].sort(([a], [b]) => (a < b ? -1 : 1)),
    );
    const text = JSON.stringify(
      { format: data.format, marks: kept, ...(data.chances && { chances: data.chances }) }, null, 1);
    const made = element("a");
    made.href = URL.createObjectURL(new Blob([`${text}\n`], { type: "application/json" }));
    made.download = "marks.json";
    made.click();
    setTimeout(() => URL.revokeObjectURL(made.href), 10_000);
  }

  Object.assign(keys, {
    j: () => step(1),
    ArrowDown: () => step(1),
    k: () => step(-1),
    ArrowUp: () => step(-1),
    a: () => mark("accept"),
    r: () => mark("reject"),
    u: () => mark(null),
    e: exportMarks,
    p: () => {
      const prefix = main.querySelector("details.prefix");
      if (prefix) prefix.open = !prefix.open;
    },
    "/": () => {
      $("filters").open = true;
      $("search").focus();
    },
  });
  for (const each of filters) each.addEventListener("change", applyFilters);
  $("search").addEventListener("input", applyFilters);
  $("export").addEventListener("click", exportMarks);
  $("accept").addEventListener("click", () => mark("accept"));
  $("reject").addEventListener("click", () => mark("reject"));
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));
  const outcomes = Object.entries(data.outcomes);
  $("counts").textContent = outcomes.length
    ? `States by outcome: ${outcomes.map(([name, n]) => `${n} ${words(name)}`).join(" · ")}`
    : `${pairs.length} pairs`;
  if (matchMedia("(max-width: 760px)").matches) $("filters").open = false;
  fillFilters();
  // A link from a session names a state; one without a pair is listed as well.
  const linked = stateId && items.find((each) => each.id === stateId);
  if (linked) {
    for (const each of filters) each.value = "";
    current = linked;
  }
  applyFilters();
  if (linked) select(linked);
}

function buildPairs(main, portions, nth, data) {
  const field = (name, told) => {
    const made = element("select");
    made.dataset.filter = name;
    return element("label", "", `${told} `, made);
  };
  const search = element("input");
  search.type = "search";
  search.id = "search";
  search.placeholder = "in both sides and the id";
  search.autocomplete = "off";
  const named = (tag, id, ...content) => Object.assign(element(tag, "", ...content), { id });
  const act = (id, told, className = "") => Object.assign(button(told, className, () => {}), { id });
  const filters = named("details", "filters", element("summary", "", "Filters ", named("span", "n-filters")), element("div", "fields",
    field("outcome", "Outcome"), field("source", "Source"), field("level", "Level"), field("teachers", "Teacher"),
    field("tools", "Tool"), field("recorded", "Record"), field("mark", "Mark"), element("label", "wide", "Text ", search)));
  filters.open = true;
  const progress = named("span", "progress");
  progress.setAttribute("role", "status");
  const count = named("p", "n-shown");
  count.setAttribute("role", "status");
  const list = element("nav", "", count, named("ol", "list"));
  list.setAttribute("aria-label", "States");
  const detail = named("article", "detail");
  detail.setAttribute("aria-live", "polite");
  main.append(
    element("div", "bar",
      selector("Pairs", portions.map((each, n) => [n, /^\d/.test(each.title) && !n ? each.title : `${each.title} (${each.n_pairs})`]), nth, (n) => { location.hash = addressOf("pairs", [n]); }),
      named("p", "counts"), element("div", "actions", progress, act("export", "Export marks", "primary"))),
    filters, element("div", "sides", list, detail),
    element("footer", "", act("previous", "← Previous"), act("reject", "Reject", "reject"), act("accept", "Accept", "accept"), act("next", "Next →")));
}
