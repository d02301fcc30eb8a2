"use strict";
// Draws the figures of the data block, in the colours of the page, and again when these change.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = Array.from(document.querySelectorAll(".plot"));
  const narrow = window.matchMedia("(max-width: 600px)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function themed(layout) {
    const made = JSON.parse(JSON.stringify(layout));
    made.paper_bgcolor = made.plot_bgcolor = "rgba(0,0,0,0)";
    made.font = { color: colour("--ink"), family: getComputedStyle(document.body).fontFamily,
                  size: narrow.matches ? 11 : 12 };
    made.hoverlabel = { bgcolor: colour("--card"), bordercolor: colour("--edge"),
                        font: { color: colour("--ink") }, align: "left" };
    made.modebar = { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--accent") };
    for (const key of Object.keys(made)) {
      if (/^[xy]axis\d*$/.test(key)) {
        made[key].gridcolor = colour("--grid");
        made[key].zerolinecolor = colour("--grid");
        made[key].linecolor = colour("--edge");
      }
    }
    if (narrow.matches) {
      made.margin = Object.assign({}, made.margin, { l: 40, r: 8 });
    }
    return made;
  }

  const config = { responsive: true, displaylogo: false, displayModeBar: "hover", doubleClick: "reset",
                   modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

  function draw() {
    return Promise.all(plots.map(function (plot) {
      const figure = figures[Number(plot.dataset.figure)];
      return Plotly.react(plot, figure.data, themed(figure.layout), config);
    }));
  }

  const again = function () { draw(); };
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
  draw().then(function () { document.documentElement.dataset.drawn = "yes"; });
})();
