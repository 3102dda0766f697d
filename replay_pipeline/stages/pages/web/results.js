tabs.push(["dataset", "Dataset", showDataset], ["training", "Training", showTraining]);

async function showDataset(main) {
  const found = await load("dataset");
  const splits = [...new Set(Object.values(found.rows_by_split).flatMap((each) => Object.keys(each)))].sort();
  main.append(element("div", "cards",
    card("Rows by part and split", table([
      ["part", ([name]) => name], ...splits.map((split) => [split, ([, n]) => number.format(n[split] ?? 0), "n"]),
    ], Object.entries(found.rows_by_split), "Rows by part and split")),
    card("Checks", table([["check", ([name]) => words(name)], ["result", ([, told]) => told]], Object.entries(found.checks ?? {}), "Checks of the dataset")),
    found.lengths?.length ? card("Length of pairs", table([
      ["prompt, tools and the longer side", (row) => `up to ${number.format(row.n_tokens)} tokens`], ["pairs", (row) => number.format(row.n), "n"]], found.lengths, "Pairs by length"),
      element("p", "note", "Tokens are estimated by words and signs, on the high side.")) : null,
    found.dropped && Object.keys(found.dropped).length ? card("Dropped by", counts(found.dropped, "Dropped by")) : null,
  ));
  main.append(element("p", "note", `It lies in ${found.dataset.split("/").slice(-2).join("/")}${found.repo_id ? `, and on the Hub as ${found.repo_id}` : ""}.`));
  if (!found.card) return;
  await forMarkdown();
  main.append(element("section", "card wide", element("h2", "", "Card"), markdown(found.card)));
}

// First in words what was learned, then before and after, one curve and three examples; the rest is folded.
async function showTraining(main) {
  const found = await load("training");
  main.append(element("h2", "", "What it learned"));
  for (const line of found.words) main.append(element("p", line.kind === "finding" ? "warning" : "", line.text));
  main.append(element("section", "figures", ...found.before_after.filter((row) => row.is_first).map((row) =>
    figure(`${row.before} → ${row.after}`, `${row.name}, before and after`))));
  const [first, ...curves] = Object.entries(found.curves).sort(([a], [b]) => (b === "train/loss") - (a === "train/loss"));
  const shown = element("div", "cards");
  main.append(shown);
  if (first) curve(shown, "The loss while it learned: lower is better", first[1]);
  shown.append(...found.examples.slice(0, 3).map(example));
  const rest = element("details", "", element("summary", "", "All figures, curves, and examples"), element("section", "card wide", table([
    ["on what was held out", (row) => row.name], ["before", (row) => row.before, "n"], ["after", (row) => row.after, "n"], ["95 % interval", (row) => row.interval ?? "", "n"],
  ], found.before_after, "Before and after")));
  const more = element("div", "cards");
  rest.append(more);
  rest.addEventListener("toggle", () => {
    for (const [name, values] of curves) curve(more, name, values);
    more.append(...[...found.examples.slice(3), ...found.seen].map(example));
  }, { once: true });
  main.append(rest);
}

function curve(place, title, values) {
  const made = card(title);
  place.append(made);
  chart(made, `${title}: ${values.length} points from ${values[0]} to ${values.at(-1)}`,
    line(values, "step", (value) => String(Number(value.toPrecision(3)))));
}

const example = ({ title, sides }) => card(title, ...sides.flatMap(([name, text]) => [element("h3", "", name), Object.assign(prose(text), { tabIndex: 0 })])); // a few lines, which may scroll
