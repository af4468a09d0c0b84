/** All groups: n rollouts of one task, with their rewards, and whether a trainer can learn from them. */

import * as api from "../api.js";
import { el } from "../dom.js";
import { searchField } from "../filters.js";
import { count, percent, plural, score, when } from "../format.js";
import { List } from "../list.js";
import { Paced } from "../paced.js";
import { go, href, note } from "../router.js";

/** @typedef {import("../api.js").Json} Json */

const AGAIN_MS = 2000; // how often the list is reloaded while it changes

const addressOf = (/** @type {string} */ name) => href(["group", name]);

/** @type {import("../list.js").Column[]} */
const COLUMNS = [
  {
    name: "name",
    label: "Group",
    sort: "group",
    cell: (row) => el("a.clip", { href: addressOf(row.group), tabindex: "-1", title: row.group, text: row.group }),
  },
  { name: "rewards", label: "Rewards", cell: (row) => rewards(row) },
  { name: "mean", label: "Mean", sort: "mean_reward", cell: (row) => score(row.mean_reward), num: true },
  { name: "pass", label: "pass@1", sort: "pass_at_1", cell: (row) => percent(row.pass_at_1), num: true },
  {
    name: "signal",
    label: "Signal",
    title: "Whether the rewards of rollouts with trainable tokens differ. If they do not, a trainer cannot learn from the group.",
    cell: (row) => signal(row),
  },
  { name: "count", label: "Rollouts", sort: "rollouts", cell: (row) => count(row.rollouts), num: true },
  {
    name: "running",
    label: "Running",
    sort: "running",
    cell: (row) => (row.running ? count(row.running) : "–"),
    num: true,
  },
  {
    name: "agent",
    label: "Agent",
    cell: (row) => el("span.clip", { title: `${row.agent}, ${row.model}`, text: row.agent || "–" }),
  },
  { name: "latest", label: "Last activity", sort: "latest", cell: (row) => when(row.latest), num: true },
];

/** Draw one square per rollout, filled according to its reward. @param {Json} row */
function rewards(row) {
  const label = `Rewards: ${row.rewards.map((/** @type {number | null} */ r) => (r === null ? "unknown" : r)).join(", ")}`;
  const strip = el("span.strip", { role: "img", "aria-label": label, title: label });
  for (const reward of row.rewards.slice(0, 16)) {
    const fill = el("span.strip-fill");
    if (reward !== null) fill.style.height = `${Math.max(0, Math.min(1, reward)) * 100}%`;
    strip.append(el("span.strip-one", { class: reward === null ? "is-none" : "" }, fill));
  }
  if (row.rewards.length > 16) strip.append(el("span.muted", { text: ` +${row.rewards.length - 16}` }));
  return strip;
}

/** @param {Json} row */
function signal(row) {
  if (row.signal === null) return el("span.muted", { title: "fewer than two rollouts with trainable tokens have a reward", text: "–" });
  return row.signal
    ? el("span.good", { text: "✓ differ" })
    : el("span.warn", { title: "all rollouts with trainable tokens have the same reward: nothing to learn", text: "= all equal" });
}

/**
 * @param {import("../router.js").Place} place
 * @returns {import("../main.js").View}
 */
export function show(place) {
  const wanted = { q: "", sort: "-latest", ...place.query };
  const total = el("span.muted", { role: "status" });
  const list = new List({
    label: "Groups",
    look: "is-groups",
    columns: COLUMNS,
    fetch: async (offset, limit, sort) => {
      const got = await api.groups({ ...wanted, sort, offset, limit });
      return { rows: got.groups, total: got.total };
    },
    key: (row) => row.group,
    open: (row) => go(addressOf(row.group)),
    sort: wanted.sort,
    place: () => JSON.stringify(["groups", wanted]),
    sorted: (sort) => change({ sort }, false),
    counted: (n) => (total.textContent = plural(n, "group")),
    none: [
      "No groups",
      'A group is n rollouts of one task. Create groups with turngate batch --n 8, or with sessions that have metadata {"group": …}.',
    ],
  });

  /** @param {Object<string, string>} what @param {boolean} [fetch] */
  function change(what, fetch = true) {
    Object.assign(wanted, what);
    note(href(["groups"], { q: wanted.q, sort: wanted.sort === "-latest" ? "" : wanted.sort }));
    if (fetch) list.reload(true);
  }

  const search = searchField(wanted.q, "Search groups, agents and models", (q) => change({ q }));
  const again = new Paced(() => list.reload(), AGAIN_MS);
  list.reload(true);
  return {
    element: el(
      "div.page.is-full",
      null,
      el("h1.visually-hidden", { text: "Groups" }),
      el("div.toolbar", { role: "search" }, search, el("span.spread"), total),
      list.element,
    ),
    title: "Groups",
    keys: [{ key: "/", does: "search", run: () => search.focus() }, ...list.keys()],
    changed: () => again.soon(),
    leave: () => {
      again.leave();
      list.leave();
    },
  };
}
