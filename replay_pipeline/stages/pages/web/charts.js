// Charts as SVG, drawn anew at each width. A chart's label has its numbers in words, and each mark a title.
const color = (n) => `var(--c${(n % 8) + 1})`;

function svg(tag, attributes, ...content) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content);
  return made;
}

function mark(tag, attributes, title, act) {
  const made = svg(tag, attributes, svg("title", {}, title));
  if (act) {
    made.classList.add("act");
    made.addEventListener("click", act);
  }
  return made;
}

function chart(place, label, draw, names = []) {
  const picture = svg("svg", { role: "img", "aria-label": label });
  const swatch = (n) => svg("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, svg("rect", { width: 1, height: 1, fill: color(n) }));
  const frame = element("div", "chart", picture, names.length > 1 && element("div", "legend", ...names.map((name, n) => element("span", "", swatch(n), name))));
  place.append(frame);
  const redraw = new ResizeObserver(([{ contentRect: { width } }]) => {
    if (width) picture.replaceChildren(...draw(width, picture.getBoundingClientRect().height));
  });
  redraw.observe(frame);
}

const axis = (ticks, format, title = "") => ({ ticks, title, labels: ticks.map((tick) => format(tick)), low: ticks[0], high: ticks.at(-1) });

// An axis of round numbers, with one for about so many pixels.
function rounds(low, high, pixels, format, title) {
  const least = (high - low || 1) / Math.max(1, pixels);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= least);
  const first = Math.floor(low / step), last = Math.max(first + 1, Math.ceil(high / step));
  return axis(Array.from({ length: last - first + 1 }, (_, n) => (first + n) * step), format, title);
}

// An axis of what is counted from one.
function counted(n, pixels, title) {
  const { ticks } = rounds(0, n, pixels, String);
  return { ...axis(ticks.filter((each) => each <= n), number.format, title), high: n };
}

// An axis of names, with as many of them as there is room for.
function named(names, most) {
  const every = Math.max(1, Math.ceil(names.length / most));
  return { ...axis([...names.keys()].filter((n) => n % every === 0), (n) => (names[n].length > 30 ? `${names[n].slice(0, 29)}…` : names[n])), low: -0.5, high: names.length - 0.5 };
}

// The axes of a plot, and where a value lies on them.
function framed(width, height, x, y, other) {
  const room = ({ labels }) => 12 + 6.8 * Math.max(...labels.map((each) => each.length));
  const [left, right, top, bottom] = [room(y), width - (other ? room(other) : 16), y.title ? 26 : 8, height - (x.title ? 40 : 22)];
  const scale = ({ low, high }, from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);
  const [atX, atY, atOther] = [scale(x, left, right), scale(y, bottom, top), other && scale(other, bottom, top)];
  const text = (across, down, anchor, said) => svg("text", { x: across, y: down, "text-anchor": anchor }, said);
  const drawn = [
    ...y.ticks.flatMap((tick, n) => [svg("line", { x1: left, x2: right, y1: atY(tick), y2: atY(tick) }), text(left - 6, atY(tick) + 4, "end", y.labels[n])]),
    ...x.ticks.map((tick, n) => text(atX(tick), bottom + 17, "middle", x.labels[n])),
    ...(other?.ticks ?? []).map((tick, n) => text(right + 6, atOther(tick) + 4, "start", other.labels[n])),
    text((left + right) / 2, height - 4, "middle", x.title), text(2, 12, "start", y.title),
  ];
  return { drawn, top, bottom, atX, atY, atOther };
}

const curved = (places, n) => svg("polyline", { points: places.map((each) => each.join()).join(" "), fill: "none", stroke: color(n), "stroke-width": 2 });

// `act` is told the place of the bar that was clicked, and of its part.
const stacked = (labels, series, format, act) => (width, height) => {
  const sums = labels.map((_, n) => series.reduce((sum, { values }) => sum + values[n], 0));
  const { drawn, atX, atY } = framed(width, height, named(labels, width / 110), rounds(0, Math.max(0, ...sums), height / 45, format));
  const wide = 0.8 * (atX(1) - atX(0)), reached = labels.map(() => 0);
  for (const [part, { name, values }] of series.entries()) {
    for (const [n, value] of values.entries()) {
      if (!value) continue;
      const from = atY(reached[n]), to = atY(reached[n] += value);
      drawn.push(mark("rect", { x: atX(n) - wide / 2, y: to, width: wide, height: from - to, fill: color(part) }, `${labels[n]}, ${name}: ${format(value)}`, () => act(n, part)));
    }
  }
  return drawn;
};

const line = (values, xTitle, format) => (width, height) => {
  const { drawn, atX, atY } = framed(width, height, counted(values.length, width / 90, xTitle),
    rounds(Math.min(...values), Math.max(...values), height / 45, format));
  return [...drawn, curved(values.map((value, n) => [atX(n + 1), atY(value)]), 0)];
};

const points = (dots, xTitle, yTitle) => (width, height) => {
  const { drawn, atX, atY } = framed(width, height, rounds(0, Math.max(...dots.map(({ x }) => x)), width / 90, (usd) => dollars(usd), xTitle),
    axis([0, 0.2, 0.4, 0.6, 0.8, 1], percent, yTitle));
  return [...drawn, ...dots.map(({ name, x, y }, n) =>
    mark("circle", { cx: atX(x), cy: atY(y), r: 8, fill: color(n) }, `${name}: ${percent(y)} alike, ${fine(x)} per 100 decisions`))];
};

const intervals = (rows, xTitle) => (width, height) => {
  const ends = rows.flatMap(({ low, high }) => [100 * low, 100 * high]);
  const names = named(rows.map(({ name }) => name), rows.length);
  const { drawn, top, bottom, atX, atY } = framed(width, height, rounds(Math.min(0, ...ends), Math.max(0, ...ends), width / 90, String, xTitle), { ...names, low: names.high, high: names.low });
  return [...drawn, svg("line", { x1: atX(0), x2: atX(0), y1: top, y2: bottom }), ...rows.map(({ name, low, high, isCeiling }, n) =>
    mark("rect", { x: atX(100 * low), y: atY(n) - 8, width: atX(100 * high) - atX(100 * low), height: 16, fill: isCeiling ? "var(--soft)" : color(0) }, `${name}: ${points100(low)} to ${points100(high)} of 100`))];
};
