/** Draw the tree of a rollout: a dot per turn, a line per branch, and the cause of each fork. */

import { el, fill, svg } from "./dom.js";
import { short } from "./format.js";
import { layout } from "./graph.js";
import { causeBadge, roleBadge } from "./status.js";

const ROW = 26;
const LANE = 16;
const LEFT = 14;

/** @typedef {import("./graph.js").Row} Row */

export class Tree {
  /** @param {(node: number) => void} chosen called with the selected turn */
  constructor(chosen) {
    this.chosen = chosen;
    /** @type {number | null} */
    this.selected = null;
    this.element = el("div.tree", { role: "group", "aria-label": "Branches" });
    /** @type {Row[]} */
    this.rows = [];
  }

  /** @param {import("./api.js").Json} tree @param {Set<number>} path nodes of the current branch */
  show(tree, path) {
    const { rows, lanes } = layout(tree);
    this.rows = rows;
    const width = LEFT + lanes * LANE;
    const image = svg("svg.tree-lines", { width, height: rows.length * ROW, "aria-hidden": "true" });
    rows.forEach((row, i) => image.append(edge(row, i, rows, path)));
    rows.forEach((row, i) => image.append(dot(row, i, path)));
    const list = el("ol.tree-rows", null, ...rows.map((row) => this.#label(row, path)));
    list.style.marginLeft = `${width}px`;
    fill(this.element, image, list);
    this.select(this.selected);
  }

  /** @param {number | null} node */
  select(node) {
    this.selected = node;
    for (const button of this.element.querySelectorAll("button.tree-row")) {
      const mine = Number(button.getAttribute("data-node")) === node;
      button.setAttribute("aria-current", String(mine));
      if (mine) keepInSight(this.element, button);
    }
  }

  /** @param {Row} row @param {Set<number>} path */
  #label(row, path) {
    const { node } = row;
    const turn = node.kind === "sampled";
    const button = el(
      "button.tree-row",
      { type: "button", class: path.has(node.id) ? "" : "is-off", data: { node: node.id }, title: node.label },
      el("span.tree-turn", { text: turn ? node.turn : "…" }),
      row.cause && causeBadge(row.cause),
      turn && node.role !== "main" && node.role !== row.cause && roleBadge(node),
      el("span.clip.tree-text", { text: turn ? node.label : "no reply yet" }),
      el("span.tree-tokens", { text: short(node.tokens) }),
    );
    button.addEventListener("click", () => this.chosen(node.id));
    return el("li", null, button);
  }
}

/** @param {Element} place @param {Element} row */
function keepInSight(place, row) {
  const [outer, inner] = [place.getBoundingClientRect(), row.getBoundingClientRect()];
  if (inner.top < outer.top) place.scrollTop -= outer.top - inner.top + ROW;
  else if (inner.bottom > outer.bottom) place.scrollTop += inner.bottom - outer.bottom + ROW;
}

/** @param {number} lane */
const x = (lane) => LEFT + lane * LANE;
/** @param {number} index */
const y = (index) => index * ROW + ROW / 2;

/** @param {Row} row @param {number} i @param {Row[]} rows @param {Set<number>} path */
function edge(row, i, rows, path) {
  const from = row.parent ?? row.left;
  if (from === null) return "";
  const [x1, y1, x2, y2] = [x(rows[from].lane), y(from), x(row.lane), y(i)];
  const bend = Math.min(ROW, y2 - y1);
  const shape =
    x1 === x2
      ? `M${x1} ${y1}V${y2}`
      : `M${x1} ${y1}C${x1} ${y1 + bend * 0.7} ${x2} ${y1 + bend * 0.3} ${x2} ${y1 + bend}V${y2}`;
  const on = path.has(row.node.id) && path.has(rows[from].node.id);
  return svg("path.tree-edge", { d: shape, class: `${on ? "is-on" : ""} ${row.parent === null ? "is-left" : ""}` });
}

/** @param {Row} row @param {number} i @param {Set<number>} path */
function dot(row, i, path) {
  const on = path.has(row.node.id) ? "is-on" : "";
  if (row.node.kind !== "sampled")
    return svg("circle.tree-dot.is-open", { cx: x(row.lane), cy: y(i), r: 4, class: on });
  if (row.cause) {
    const [a, b] = [x(row.lane), y(i)];
    return svg("path.tree-dot", {
      d: `M${a} ${b - 6}L${a + 6} ${b}L${a} ${b + 6}L${a - 6} ${b}Z`,
      class: `${on} ${row.node.trained ? "" : "is-untrained"}`,
    });
  }
  return svg("circle.tree-dot", {
    cx: x(row.lane),
    cy: y(i),
    r: 4.5,
    class: `${on} ${row.node.trained ? "" : "is-untrained"}`,
  });
}
