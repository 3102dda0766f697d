// Shows what the address asks for, and passes keys to the tab that is shown.
const ORDER = ["overview", "sessions", "teachers", "pairs", "dataset", "training"];

async function show() {
  const asked = address();
  const { tabs: present, root, is_redacted: isRedacted, timezone } = await load("overview");
  for (const key of Object.keys(keys)) delete keys[key];
  const shown = ORDER.map((name) => tabs.find(([tab]) => tab === name)).filter(([name]) => ["overview", "sessions"].includes(name) || present.includes(name));
  const current = asked.tab === "session" ? "sessions" : asked.tab;
  $("tabs").replaceChildren(...shown.map(([name, told]) => {
    const tab = link(told, addressOf(name));
    if (name === current) tab.setAttribute("aria-current", "page");
    return tab;
  }));
  $("where").replaceChildren(...(location.protocol.startsWith("http")
    ? [link("Dagster: assets", "/asset-groups"), " · ", link("its last runs", "/runs")]
    : [root ? `From ${root}. ` : "", `Times in ${timezone}. ${isRedacted ? "Redacted" : "NOT redacted, as the settings say"}; sends nothing.`]));
  const main = element("main", asked.tab);
  main.id = "main";
  main.tabIndex = -1;
  const view = asked.tab === "session" ? showSession : shown.find(([name]) => name === asked.tab)?.[2];
  document.title = `${shown.find(([name]) => name === current)?.[1] ?? "Sessions"} · replay-pipeline`;
  $("main").replaceWith(main);
  try {
    if (view) await view(main, asked);
    else main.append(element("p", "empty", "Nothing has this address."));
  } catch (error) {
    main.append(element("p", "warning", error.message));
  }
  document.documentElement.dataset.ready = location.hash;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.key === "Escape") {
    event.preventDefault(); // The browser would empty the search without a word.
    document.activeElement?.blur();
  }
  if (event.target.closest("input, select, textarea")) return;
  const nth = $("tabs").children[Number(event.key) - 1];
  const act = event.key === "?" ? () => $("help").showModal() : nth ? () => nth.click() : keys[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

addEventListener("hashchange", show);
show();
