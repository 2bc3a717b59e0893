"use strict";
// The charts, drawn by Plotly from the data in the page: chosen axis, chosen runs, shaded EST stages.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = ["solid", "dot", "dash", "dashdot", "longdash", "longdashdot"];
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "x", "star"];
  const GREYS = ["rgba(60,80,120,0.13)", "rgba(60,80,120,0.07)", "rgba(60,80,120,0.02)"];
  const hidden = new Set();
  const axis = document.getElementById("axis");

  function trace(series) {
    const x = series.x[axis.value];
    if (!x) return null;
    const color = data.runs[series.run].color;
    return {
      x, y: series.y, name: series.name, type: "scatter",
      mode: series.markers || x.length < 3 ? "lines+markers" : "lines",
      visible: !hidden.has(series.run),
      line: { color, width: series.markers ? 1.5 : 2, dash: DASHES[series.style % DASHES.length] },
      marker: { color, size: 7, symbol: SYMBOLS[series.style % SYMBOLS.length] },
    };
  }

  // Each run's stages once, the small subnets darkest.
  function shades(stages) {
    const seen = new Set(), shapes = [];
    for (const stage of stages) {
      const ends = stage.x[axis.value];
      if (!ends || hidden.has(stage.run) || seen.has(String(ends))) continue;
      seen.add(String(ends));
      shapes.push({
        type: "rect", xref: "x", yref: "paper", x0: ends[0], x1: ends[1], y0: 0, y1: 1, layer: "below",
        line: { width: 0 }, fillcolor: GREYS[Math.min(stage.number, GREYS.length - 1)],
        label: { text: `stage ${stage.number}`, textposition: "top center", font: { size: 10, color: "#5b6470" } },
      });
    }
    return shapes;
  }

  function layout(chart, xTitle) {
    return {
      title: { text: chart.title, font: { size: 14 }, x: 0.02, xanchor: "left" },
      margin: { l: 62, r: 14, t: 40, b: 70 }, hovermode: "x unified",
      xaxis: { title: { text: xTitle, standoff: 6 }, gridcolor: "#eceef1", zeroline: false, automargin: true,
               ...(chart.powers ? { type: "log", dtick: Math.log10(2) } : {}) },
      yaxis: { title: { text: chart.unit, standoff: 6 }, type: chart.log ? "log" : "linear", gridcolor: "#eceef1",
               zeroline: false, automargin: true, exponentformat: "power" },
      legend: { orientation: "h", y: -0.2, x: 0, font: { size: 11 } },
      font: { family: "system-ui, sans-serif", size: 12 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
      barmode: "stack", showlegend: true,
    };
  }

  const OPTIONS = { responsive: true, displaylogo: false };

  function draw() {
    for (const chart of data.charts) {
      const traces = chart.series.map(trace).filter(Boolean);
      Plotly.react(chart.id, traces, { ...layout(chart, axis.value), shapes: shades(chart.stages) }, OPTIONS);
    }
  }

  for (const chart of data.plain) {
    const traces = chart.series.map((s) => ({ type: chart.bar ? "bar" : "scatter", ...s }));
    Plotly.newPlot(chart.id, traces, layout(chart, chart.x), OPTIONS);
  }
  axis.addEventListener("change", draw);
  for (const box of document.querySelectorAll("[data-run]")) {
    box.addEventListener("change", () => {
      const run = Number(box.dataset.run);
      box.checked ? hidden.delete(run) : hidden.add(run);
      draw();
    });
  }
  draw();
  window.report = { data, timelines: [] };
})();
