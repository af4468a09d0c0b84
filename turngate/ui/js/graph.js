/**
 * The layout of a tree: one row per turn, in the order of recording, and one lane per branch, like a version history. `tree.js` draws it.
 */

/** @typedef {import("./api.js").Json} Json */

/**
 * @typedef {object} Row
 * @property {Json} node the turn, or a context without a reply yet
 * @property {number} lane
 * @property {number | null} parent index of the row of the turn before it
 * @property {string} cause why a branch starts here; empty if none does
 * @property {number | null} left index of the row that a branch with its own root was forked from
 * @property {Json | null} fork what is known about the fork
 */

/**
 * @param {Json} tree as the API returns it
 * @returns {{rows: Row[], lanes: number}}
 */
export function layout(tree) {
  const byId = new Map(tree.nodes.map((/** @type {Json} */ n) => [n.id, n]));
  const forks = new Map(tree.forks.map((/** @type {Json} */ f) => [f.node, f]));
  const answered = new Set(
    tree.nodes.filter((/** @type {Json} */ n) => n.kind === "sampled").map((/** @type {Json} */ n) => n.parent),
  );
  const shown = tree.nodes.filter((/** @type {Json} */ n) => n.kind === "sampled" || !answered.has(n.id));
  const rowOf = new Map(shown.map((/** @type {Json} */ n, /** @type {number} */ i) => [n.id, i]));
  /** @type {Row[]} */
  const rows = shown.map((/** @type {Json} */ node) => {
    const context = node.kind === "sampled" ? byId.get(node.parent) : node;
    const before = context?.parent ?? null;
    const fork = forks.get(node.id) ?? (context && forks.get(context.id)) ?? null;
    const cause = node.cause ?? context?.cause ?? fork?.cause ?? "";
    const left =
      before === null && fork?.from !== null && fork?.from !== undefined ? turnAt(byId, rowOf, fork.from) : null;
    return {
      node,
      lane: 0,
      parent: before === null ? null : (rowOf.get(before) ?? null),
      cause: cause ?? "",
      left,
      fork,
    };
  });
  return { rows, lanes: laned(rows, tree.main === null ? null : (rowOf.get(tree.main) ?? null)) };
}

/**
 * Return the row of a node or, for a context, of the nearest turn above it.
 * @param {Map<number, Json>} byId
 * @param {Map<number, number>} rowOf
 * @param {number | null} id
 */
function turnAt(byId, rowOf, id) {
  let at = id;
  while (at !== null && at !== undefined) {
    const row = rowOf.get(at);
    if (row !== undefined) return row;
    at = byId.get(at)?.parent ?? null;
  }
  return null;
}

/**
 * Assign a lane to each row. The main branch has the first lane; every other branch has the first lane that is free along its whole length.
 * @param {Row[]} rows
 * @param {number | null} main the row of the main branch's last turn
 */
function laned(rows, main) {
  const lane = new Array(rows.length).fill(-1);
  for (let at = main; at !== null; at = rows[at].parent) lane[at] = 0;
  const heir = rows.map(() => -1); // the row that continues in the same lane
  rows.forEach((row, i) => {
    if (row.parent === null) return;
    const mine = lane[i] === 0 && lane[row.parent] === 0;
    if (mine || (heir[row.parent] === -1 && lane[row.parent] !== 0)) heir[row.parent] = i;
  });
  /** @type {number[]} for each lane, the row up to which it is occupied */
  const taken = [rows.length];
  rows.forEach((row, i) => {
    if (lane[i] !== -1) return;
    let end = i;
    while (heir[end] > end) end = heir[end];
    const from = row.parent ?? row.left ?? i;
    let free = taken.findIndex((until, at) => at > 0 && until < from);
    if (free === -1) free = taken.push(0) - 1;
    taken[free] = end;
    for (let at = i; at !== -1; at = heir[at]) lane[at] = free;
  });
  rows.forEach((row, i) => (row.lane = Math.max(0, lane[i])));
  return taken.length;
}
