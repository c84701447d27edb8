// Lets the reader of a report choose a sublayer, a token and a cell. All drawing is Plotly's.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const map = document.getElementById("map");
  const bytes = Uint8Array.from(atob(data.weights), (character) => character.charCodeAt(0));
  const numbers = new Uint16Array(bytes.buffer);
  const starts = [0];
  data.sources.forEach((sources) => starts.push(starts.at(-1) + sources * data.tokens.length));
  const chosen = { sublayer: "attention", token: null, cell: null };

  // Weight of a token in a row and column of the chosen sublayer's map; null where none is read.
  function weight(row, column, token) {
    const reader = data.readers[chosen.sublayer][row];
    if (column >= data.sources[reader]) return null;
    return numbers[starts[reader] + column * data.tokens.length + token] / data.full_weight;
  }

  function table(trace) {
    if (chosen.token === null) return trace.z;
    return trace.z.map((line, row) => line.map((_, column) => weight(row, column, chosen.token)));
  }

  function drawMap() {
    const figure = data.figures[chosen.sublayer];
    const [cells, dots] = figure.data;
    const frames = chosen.cell === null ? [] : [frame(chosen.cell)];
    const layout = { ...figure.layout, shapes: [...figure.layout.shapes, ...frames] };
    Plotly.react(map, [{ ...cells, z: table(cells) }, dots], layout, data.config);
  }

  function frame([row, column]) {
    const edges = { x0: column - 0.5, x1: column + 0.5, y0: row - 0.5, y1: row + 0.5 };
    return { type: "rect", ...edges, line: { color: "#c4161c", width: 2 } };
  }

  function colour(value) {
    const stops = data.colours;
    const above = Math.max(1, stops.findIndex(([place]) => place >= value));
    const [[low, from], [high, to]] = [stops[above - 1], stops[above]];
    const share = (value - low) / (high - low);
    return `rgb(${from.map((part, index) => Math.round(part + share * (to[index] - part)))})`;
  }

  function colourTokens() {
    tokens.forEach((button, token) => {
      const value = chosen.cell === null ? null : weight(...chosen.cell, token);
      button.title = `token ${token + 1}` + (value === null ? "" : `: weight ${value.toFixed(4)}`);
      button.style.backgroundColor = value === null ? "" : colour(value);
      button.style.color = value === null || value >= data.light_from ? "#222" : "#fff";
      button.setAttribute("aria-pressed", token === chosen.token);
    });
  }

  function tell() {
    const { sublayer, token, cell } = chosen;
    const whose = token === null ? data.mean : `token ${token + 1}, ${data.tokens[token]}`;
    document.getElementById("shown").textContent = `${data.titles[sublayer]} weights, ${whose}`;
    const cells = map.data[0];
    document.getElementById("told").textContent =
      cell === null
        ? ""
        : `Tokens are coloured by their weight at ${cells.customdata[cell[0]][cell[1]]}; ` +
          `the map shows ${cells.z[cell[0]][cell[1]].toFixed(4)} there.`;
    document.querySelectorAll("[data-sublayer]").forEach((button) => {
      button.setAttribute("aria-pressed", button.dataset.sublayer === sublayer);
    });
    document.getElementById("mean").setAttribute("aria-pressed", token === null);
  }

  function choose(change) {
    Object.assign(chosen, change);
    // The other sublayer's map may have nothing in that cell.
    if (chosen.cell !== null && weight(...chosen.cell, 0) === null) chosen.cell = null;
    drawMap();
    colourTokens();
    tell();
  }

  const tokens = data.tokens.map((text, token) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => choose({ token }));
    document.getElementById("tokens").append(button);
    return button;
  });
  document.querySelectorAll("[data-sublayer]").forEach((button) => {
    button.addEventListener("click", () => choose({ sublayer: button.dataset.sublayer }));
  });
  document.getElementById("mean").addEventListener("click", () => choose({ token: null }));
  choose({});
  map.on("plotly_click", ({ points: [point] }) => choose({ cell: [point.y, point.x] }));
})();
