/**
 * Small charts: lines, dots and bars with axes, units and a legend, and a table of the same data for screen readers. The arrow
 * keys, like the pointer, select points.
 */

import { el, svg } from "./dom.js";
import { number, plural } from "./format.js";
import { nice, scale, times } from "./axis.js";
import { line, table } from "./table.js";

const ROOM = { top: 12, right: 14, bottom: 34, left: 52 };
const HEIGHT = 190;
const WIDEST = 56; // maximum width of a bar, in pixels

/**
 * @typedef {[number, number | null]} Point
 * @typedef {{name: string, points: Point[], kind?: "line" | "dots" | "bars", shade?: number, faint?: boolean}} Series `shade` is the
 *   index of the color; a `faint` series is drawn behind the others
 * @typedef {object} Options
 * @property {string} title
 * @property {string} x label of the horizontal axis, with its unit
 * @property {string} y
 * @property {Series[]} series
 * @property {boolean} [clock] the horizontal axis is time, in seconds
 * @property {(value: number) => string} [xText]
 * @property {(value: number) => string} [yText]
 * @property {boolean} [whole] label only whole numbers on the horizontal axis
 * @property {boolean} [wholeY] label only whole numbers on the vertical axis
 * @property {[number, number]} [yRange] range of the vertical axis; by default, that of the data
 * @property {string} [empty] text to show if there is no data
 */

/**
 * @param {Options} options
 * @returns {HTMLElement}
 */
export function chart(options) {
  const readout = el("p.chart-readout", { "aria-live": "polite" });
  const picture = el("div.chart-picture", { tabindex: "0", role: "img", "aria-label": spoken(options) });
  const series = options.series.map(drawable).filter((one) => one.points.some((p) => p[1] !== null));
  const head = el(
    "figcaption.chart-head",
    null,
    el("span.chart-title", { text: options.title }),
    legend(series),
    readout,
  );
  const figure = el("figure.chart", null, head, picture);
  if (!series.length) {
    picture.append(el("p.chart-none", { text: options.empty ?? "No data yet." }));
    return figure;
  }
  const draw = () => drawn(picture, readout, { ...options, series });
  new ResizeObserver(draw).observe(picture);
  figure.append(numbers({ ...options, series }));
  return figure;
}

/** Remove the points that cannot be placed on an axis. @param {Series} one @returns {Series} */
function drawable(one) {
  const placed = one.points.filter((p) => Number.isFinite(p[0]));
  return { ...one, points: placed.map(([at, value]) => [at, Number.isFinite(value) ? value : null]) };
}

/** @param {Options} options */
function spoken(options) {
  const sizes = options.series.map((one) => `${one.name}: ${plural(one.points.length, "point")}`).join("; ");
  return `${options.title}. ${options.y} by ${options.x}. ${sizes}. Use the arrow keys to read the points. A table follows.`;
}

/** @param {Series[]} series */
function legend(series) {
  if (series.length < 2) return null;
  const entry = (/** @type {Series} */ one, /** @type {number} */ i) =>
    el(
      "li",
      null,
      el("span.chart-key", { class: `s${one.shade ?? i} ${one.faint ? "is-faint" : ""}`, "aria-hidden": "true" }),
      one.name,
    );
  return el("ul.chart-legend", null, ...series.map(entry));
}

/**
 * @param {HTMLElement} picture
 * @param {HTMLElement} readout
 * @param {Options} options
 */
function drawn(picture, readout, options) {
  const width = Math.max(240, picture.clientWidth);
  const points = options.series.flatMap((one) => one.points).filter((p) => p[1] !== null);
  const bars = options.series.some((one) => one.kind === "bars");
  const [y0, y1] =
    options.yRange ??
    spread(
      points.map((p) => /** @type {number} */ (p[1])),
      bars,
    );
  const xs = points.map((p) => p[0]);
  const step = bars ? smallest(xs) / 2 : 0;
  const x = scale(Math.min(...xs) - step, Math.max(...xs) + step, ROOM.left, width - ROOM.right);
  const y = scale(y0, y1, HEIGHT - ROOM.bottom, ROOM.top);
  const image = svg("svg.chart-svg", {
    width,
    height: HEIGHT,
    viewBox: `0 0 ${width} ${HEIGHT}`,
    "aria-hidden": "true",
  });
  image.append(axes(options, x, y, width, [y0, y1], [Math.min(...xs), Math.max(...xs)]));
  options.series.forEach((one, i) => image.append(shape(one, one.shade ?? i, x, y, y(Math.max(0, y0)), step)));
  const rule = svg("line.chart-rule", { y1: ROOM.top, y2: HEIGHT - ROOM.bottom, x1: -9, x2: -9 });
  image.append(rule);
  picture.replaceChildren(image);
  follow(picture, readout, options, x, rule);
}

/**
 * @param {number[]} values
 * @param {boolean} zero
 * @returns {[number, number]}
 */
function spread(values, zero) {
  let low = Math.min(...values, zero ? 0 : Infinity);
  let high = Math.max(...values, zero ? 0 : -Infinity);
  if (low === high)
    [low, high] = [Math.min(low, 0), high === 0 ? 1 : Math.min(Number.MAX_VALUE, Math.max(high * 1.1, 0))];
  const ticks = nice(low, high, 4);
  return [Math.min(low, ticks[0]), Math.max(high, ticks[ticks.length - 1])];
}

/** @param {number[]} xs */
function smallest(xs) {
  const sorted = [...new Set(xs)].sort((a, b) => a - b);
  let gap = Infinity;
  for (let i = 1; i < sorted.length; i++) gap = Math.min(gap, sorted[i] - sorted[i - 1]);
  return Number.isFinite(gap) ? gap : 1;
}

/**
 * @param {Options} options
 * @param {(v: number) => number} x
 * @param {(v: number) => number} y
 * @param {number} width
 * @param {[number, number]} yRange
 * @param {[number, number]} xRange
 */
function axes(options, x, y, width, yRange, xRange) {
  const made = svg("g.chart-axes");
  const bottom = HEIGHT - ROOM.bottom;
  for (const tick of nice(...yRange, 4)) {
    if (tick < yRange[0] || tick > yRange[1] || (options.wholeY && !Number.isInteger(tick))) continue;
    made.append(svg("line.chart-grid", { x1: ROOM.left, x2: width - ROOM.right, y1: y(tick), y2: y(tick) }));
    made.append(svg("text.chart-y", { x: ROOM.left - 6, y: y(tick) + 4, text: (options.yText ?? number)(tick) }));
  }
  const ticks = (options.clock ? times : nice)(...xRange, Math.max(2, Math.floor(width / 110)));
  for (const tick of options.clock ? ticks : ticks.filter((value) => !options.whole || Number.isInteger(value))) {
    if (tick < xRange[0] || tick > xRange[1]) continue;
    made.append(svg("line.chart-tick", { x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }));
    made.append(svg("text.chart-x", { x: x(tick), y: bottom + 15, text: (options.xText ?? number)(tick) }));
  }
  made.append(svg("line.chart-base", { x1: ROOM.left, x2: width - ROOM.right, y1: bottom, y2: bottom }));
  made.append(svg("text.chart-label", { x: width - ROOM.right, y: HEIGHT - 5, text: options.x }));
  made.append(
    svg("text.chart-unit", {
      x: 10,
      y: HEIGHT / 2 - 10,
      transform: `rotate(-90 10 ${HEIGHT / 2 - 10})`,
      text: options.y,
    }),
  );
  return made;
}

/**
 * @param {Series} one
 * @param {number} shade
 * @param {(v: number) => number} x
 * @param {(v: number) => number} y
 * @param {number} zero
 * @param {number} half half the space available for a bar
 */
function shape(one, shade, x, y, zero, half) {
  const known = /** @type {[number, number][]} */ (one.points.filter((p) => p[1] !== null));
  const group = svg("g", { class: `s${shade} ${one.faint ? "is-faint" : ""}` });
  if (one.kind === "bars") {
    for (const [at, value] of known) {
      const wide = Math.max(1, Math.min(WIDEST, x(at + half * 0.72) - x(at - half * 0.72)));
      const size = { width: wide, height: Math.max(1, Math.abs(zero - y(value))) };
      group.append(svg("rect.chart-bar", { x: x(at) - wide / 2, y: Math.min(zero, y(value)), ...size }));
    }
    return group;
  }
  if (one.kind !== "dots") {
    const path = known.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    group.append(svg("path.chart-line", { d: path }));
  }
  if (one.kind === "dots" || (known.length <= 40 && !one.faint)) {
    for (const [at, value] of known)
      group.append(svg("circle.chart-dot", { cx: x(at), cy: y(value), r: one.kind === "dots" ? 3.2 : 2.4 }));
  }
  return group;
}

/**
 * Show the numbers under the pointer, or at the point selected with the arrow keys.
 * @param {HTMLElement} picture
 * @param {HTMLElement} readout
 * @param {Options} options
 * @param {(v: number) => number} x
 * @param {SVGLineElement} rule
 */
function follow(picture, readout, options, x, rule) {
  const stops = [...new Set(options.series.flatMap((one) => one.points.map((p) => p[0])))].sort((a, b) => a - b);
  let at = -1;
  const show = (/** @type {number} */ i) => {
    at = Math.max(0, Math.min(stops.length - 1, i));
    rule.setAttribute("x1", String(x(stops[at])));
    rule.setAttribute("x2", String(x(stops[at])));
    const labels = options.series.flatMap((one) => {
      const values = one.points
        .filter((p) => p[0] === stops[at] && p[1] !== null)
        .map((p) => /** @type {number} */ (p[1]));
      return values.length
        ? [
            `${one.name} ${values
              .slice(0, 3)
              .map((v) => (options.yText ?? number)(v))
              .join(", ")}`,
          ]
        : [];
    });
    readout.textContent = `${options.x} ${(options.xText ?? number)(stops[at])}: ${labels.join(" · ") || "–"}`;
  };
  picture.onpointermove = (event) => {
    const left = event.clientX - picture.getBoundingClientRect().left;
    let best = 0;
    stops.forEach((stop, i) => {
      if (Math.abs(x(stop) - left) < Math.abs(x(stops[best]) - left)) best = i;
    });
    show(best);
  };
  picture.onpointerleave = () => {
    rule.setAttribute("x1", "-9");
    rule.setAttribute("x2", "-9");
    readout.textContent = "";
  };
  picture.onkeydown = (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    event.preventDefault();
    show(at + (event.key === "ArrowRight" ? 1 : -1));
  };
}

/** @param {Options} options */
function numbers(options) {
  /** @type {import("./table.js").Head[]} */
  const heads = [
    ["series", ""],
    [options.x, "num"],
    [options.y, "num"],
  ];
  const rows = () =>
    options.series.flatMap((one) =>
      one.points.map(([at, value]) =>
        line(heads, [one.name, (options.xText ?? number)(at), value === null ? "–" : (options.yText ?? number)(value)]),
      ),
    );
  const made = el("details.chart-table", null, el("summary", { text: "Data" }));
  made.addEventListener("toggle", () => {
    if (made.open && made.childElementCount === 1)
      made.append(el("div.scroll", null, table(heads, rows().slice(0, 500))));
  });
  return made;
}
