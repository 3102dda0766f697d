// Charts by Chart.js, in the colors of the page; each has its numbers as a table beside it.
const drawn = [];
const PALETTE = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let resolved;

// Colors of the style sheet may be written as light-dark(): the browser says what they come to.
function shade(name) {
  resolved ??= document.body.appendChild(element("span", "probe"));
  resolved.style.color = `var(${name})`;
  return getComputedStyle(resolved).color;
}

async function chart(place, label, configure) {
  const canvas = element("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  const frame = element("div", "chart", canvas);
  place.append(frame);
  await library("chart.umd", "Chart");
  const make = () => {
    Chart.defaults.color = shade("--soft");
    Chart.defaults.borderColor = shade("--line");
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    Chart.defaults.animation = false;
    return new Chart(canvas, configure());
  };
  const one = { canvas, make, now: make() };
  drawn.push(one);
  return frame;
}

function clearCharts() {
  for (const { now } of drawn.splice(0)) now.destroy();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const one of drawn) {
    one.now.destroy();
    one.now = one.make();
  }
});

const axis = (title, format, more = {}) => ({
  title: { display: Boolean(title), text: title },
  ticks: { callback: format, maxRotation: 0 },
  ...more,
});

// `act` is told the place of the bar that was clicked, and of its part.
function stacked(labels, series, format, act) {
  return () => ({
    type: "bar",
    data: {
      labels,
      datasets: series.map(({ name, values }, n) => ({
        label: name, data: values, backgroundColor: shade(PALETTE[n % PALETTE.length]), stack: "all",
      })),
    },
    options: {
      responsive: true, maintainAspectRatio: false, ...clicked(act),
      scales: { x: { stacked: true, grid: { display: false }, ticks: { maxRotation: 0, autoSkipPadding: 12 } }, y: axis("", format, { stacked: true, beginAtZero: true }) },
      plugins: {
        legend: { position: "bottom", labels: { boxWidth: 12 } },
        tooltip: { callbacks: { label: (item) => `${item.dataset.label}: ${format(item.raw)}` } },
      },
    },
  });
}

const clicked = (act) => ({
  onClick: (_, [first]) => first && act(first.index, first.datasetIndex),
  onHover: ({ native }, found) => { native.target.style.cursor = found.length ? "pointer" : "default"; },
});

function lines(series, xTitle, format) {
  return () => ({
    type: "line",
    data: {
      datasets: series.map(({ name, points }, n) => ({
        label: name, data: points, borderColor: shade(PALETTE[n % PALETTE.length]), borderWidth: 2, pointRadius: 0,
      })),
    },
    options: {
      responsive: true, maintainAspectRatio: false, parsing: false,
      scales: { x: { type: "linear", ...axis(xTitle, (value) => number.format(value)) }, y: axis("", format) },
      plugins: { legend: { display: series.length > 1, position: "bottom", labels: { boxWidth: 12 } } },
    },
  });
}

function points(series, xTitle, yTitle) {
  return () => ({
    type: "scatter",
    data: {
      datasets: series.map(({ name, x, y }, n) => ({
        label: name, data: [{ x, y }], clip: false, backgroundColor: shade(PALETTE[n % PALETTE.length]), pointRadius: 8, pointHoverRadius: 10,
      })),
    },
    options: {
      responsive: true, maintainAspectRatio: false,
      scales: {
        x: axis(xTitle, (value) => `$${value.toFixed(2)}`, { beginAtZero: true }),
        y: axis(yTitle, (value) => `${Math.round(100 * value)} %`, { min: 0, max: 1, grace: 0 }),
      },
      plugins: {
        legend: { position: "bottom", labels: { boxWidth: 12 } },
        tooltip: { callbacks: { label: (item) => `${item.dataset.label}: ${percent(item.raw.y)} alike, ${fine(item.raw.x)} per 100 decisions` } },
      },
    },
  });
}

function intervals(rows, xTitle) {
  return () => ({
    type: "bar",
    data: {
      labels: rows.map((row) => row.name),
      datasets: [{
        data: rows.map((row) => [100 * row.low, 100 * row.high]),
        backgroundColor: rows.map((row) => shade(row.isCeiling ? "--soft" : PALETTE[0])), barThickness: 16, borderSkipped: false,
      }],
    },
    options: {
      indexAxis: "y", responsive: true, maintainAspectRatio: false,
      scales: { x: axis(xTitle, (value) => `${value}`), y: { grid: { display: false } } },
      plugins: { legend: { display: false }, tooltip: { callbacks: { label: (item) => `${Math.round(item.raw[0])} to ${Math.round(item.raw[1])} of 100` } } },
    },
  });
}
