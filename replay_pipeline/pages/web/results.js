tabs.push(["dataset", "Dataset", showDataset], ["training", "Training", showTraining]);

async function showDataset(main) {
  const found = await load("dataset");
  const splits = [...new Set(Object.values(found.rows_by_split).flatMap((each) => Object.keys(each)))].sort();
  main.append(element("div", "cards",
    card("Rows by part and split", table([
      ["part", ([name]) => name], ...splits.map((split) => [split, ([, n]) => number.format(n[split] ?? 0), "n"]),
    ], Object.entries(found.rows_by_split), "Rows by part and split")),
    card("Checks", table([["check", ([name]) => words(name)], ["", ([, told]) => told]], Object.entries(found.checks ?? {}), "Checks of the dataset")),
    found.lengths?.length ? card("Length of pairs", table([
      ["prompt, tools and the longer side", (row) => `up to ${number.format(row.n_tokens)} tokens`], ["pairs", (row) => number.format(row.n), "n"]], found.lengths, "Pairs by length"),
      element("p", "note", "Tokens are estimated by words and signs, on the high side.")) : null,
    found.dropped && Object.keys(found.dropped).length ? card("Dropped by", counts(found.dropped, "Dropped by")) : null,
  ));
  main.append(element("p", "note", `It lies in ${found.dataset.split("/").slice(-2).join("/")}${found.repo_id ? `, and on the Hub as ${found.repo_id}` : ""}.`));
  if (found.card) main.append(element("section", "card wide", element("h2", "", "Card"), prose(found.card)));
}

async function showTraining(main) {
  const found = await load("training");
  for (const line of found.words) main.append(element("p", line.kind === "finding" ? "warning" : "", line.text));
  main.append(element("section", "card wide", element("h2", "", "Before and after, on what was held out"), table([
    ["", (row) => row.name], ["before", (row) => row.before, "n"], ["after", (row) => row.after, "n"], ["95 % interval", (row) => row.interval ?? "", "n"],
  ], found.before_after, "Before and after")));
  const curves = element("div", "cards");
  main.append(curves);
  for (const [name, values] of Object.entries(found.curves)) {
    const place = card(name);
    curves.append(place);
    chart(place, `${name}: ${values.length} points from ${values[0]} to ${values.at(-1)}`,
      lines([{ name, points: values.map((y, x) => ({ x: x + 1, y })) }], "point", (value) => Number(value.toPrecision(3))));
  }
  for (const each of [...(found.examples ?? []), ...(found.seen ?? [])]) {
    main.append(element("section", "card wide", element("h2", "", each.title), ...each.sides.flatMap(([name, text]) => [element("h3", "", name), prose(text)])));
  }
}
