/** Tables of the training view: the feeds and their progress, and the delivered groups. */

import { el } from "./dom.js";
import { count, number, score, when } from "./format.js";
import { href } from "./router.js";
import { line, table } from "./table.js";

/** @typedef {import("./api.js").Json} Json */

/** @type {import("./table.js").Head[]} */
const FEEDS = [
  ["feed", ""],
  ["complete", "num"],
  ["handed out", "num"],
  ["committed", "num"],
  ["waiting", "num"],
  ["has had a reader", ""],
];
/** @type {import("./table.js").Head[]} */
const DELIVERIES = [
  ["number", "num"],
  ["feed", ""],
  ["group", ""],
  ["rollouts", "num"],
  ["mean reward", "num"],
  ["version", "num"],
  ["behind", "num"],
  ["when", ""],
];

/** @param {Json[]} feeds */
export function feeds(feeds) {
  const cells = (/** @type {Json} */ one) => [
    one.name,
    count(one.newest),
    count(one.handed),
    count(one.committed),
    count(one.waiting),
    one.read ? "yes" : "no",
  ];
  return section(
    "Feeds",
    table(
      FEEDS,
      feeds.map((one) => line(FEEDS, cells(one))),
    ),
  );
}

/** @param {Json[]} all */
export function deliveries(all) {
  const newest = all.slice(-100).reverse();
  const cells = (/** @type {Json} */ one) => [
    one.number,
    one.feed,
    el("a", { href: href(["group", one.group]), text: one.group }),
    count(one.rollouts),
    score(one.mean),
    number(one.version),
    number(one.behind),
    when(one.at),
  ];
  return section(
    `Deliveries (newest ${newest.length})`,
    table(
      DELIVERIES,
      newest.map((one) => line(DELIVERIES, cells(one))),
    ),
  );
}

/** @param {string} title @param {Node} content */
function section(title, content) {
  return el(
    "section.panel",
    null,
    el("div.panel-head", null, el("h2", { text: title })),
    el("div.table-scroll", null, content),
  );
}
