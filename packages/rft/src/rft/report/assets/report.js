"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const place = document.getElementById("curves");
  const drawn = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const numbersOf = (name) => {
    const table = name in data.training.series ? data.training : data.evaluations;
    return [table.steps, table.series[name]];
  };

  const summary = (name, values) => {
    const known = values.filter((value) => value !== null);
    if (!known.length) return name;
    const [low, high] = [Math.min(...known), Math.max(...known)];
    return `${name}: first ${known[0]}, last ${known[known.length - 1]}, lowest ${low}, highest ${high}`;
  };

  const options = (name, width) => ({
    width, height: 220,
    cursor: {sync: {key: "steps"}},
    scales: {x: {time: false}},
    series: [
      {label: "step"},
      {label: name, stroke: colour("--ink"), width: 1.5, spanGaps: true,
       points: {show: numbersOf(name)[0].length < 40}},
    ],
    axes: [
      {stroke: colour("--dim"), grid: {stroke: colour("--line")}},
      {stroke: colour("--dim"), grid: {stroke: colour("--line")}, size: 64},
    ],
  });

  const draw = (name) => {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const known = numbersOf(name)[1].filter((value) => value !== null);
    caption.textContent = known.length ? `${name}, at the end ${known[known.length - 1]}` : name;
    figure.append(caption);
    place.append(figure);
    figure.setAttribute("role", "img");
    figure.setAttribute("aria-label", summary(name, numbersOf(name)[1]));
    const entry = {name, figure, plot: null};
    entry.again = () => {
      if (entry.plot) entry.plot.destroy();
      entry.plot = new uPlot(options(name, figure.clientWidth), numbersOf(name), figure);
    };
    entry.again();
    drawn.push(entry);
  };

  data.curves.forEach(draw);
  Object.keys(data.evaluations.series).filter((name) => /accuracy$|loss$|reward$/.test(name)).slice(0, 3).forEach(draw);
  const more = document.getElementById("more");
  for (const name of [...Object.keys(data.training.series), ...Object.keys(data.evaluations.series)].sort()) {
    const option = document.createElement("option");
    option.value = option.textContent = name;
    more.append(option);
  }
  more.addEventListener("change", () => {
    if (more.value && !drawn.some((entry) => entry.name === more.value)) draw(more.value);
    more.value = "";
  });
  const each = data.training.steps_a_point;
  document.getElementById("points").textContent = each > 1 ? `A point is the mean of ${each} steps.` : "";
  let asked = 0;
  const redraw = () => {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => drawn.forEach((entry) => entry.again()));
  };
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
