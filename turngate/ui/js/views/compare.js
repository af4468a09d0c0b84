/** Two rollouts side by side: their main conversations, turn by turn, with the first difference marked. */

import { el, fill } from "../dom.js";
import { count, duration, plural } from "../format.js";
import { seen } from "../hidden.js";
import { briefly, messageOf, textOf } from "../message.js";
import { empty, failed, loading } from "../notice.js";
import { Record } from "../record.js";
import { href, note } from "../router.js";
import { addressOf, facts, nameOf, rewardCell, state } from "../status.js";
import { plain } from "../text.js";

/** @typedef {import("../api.js").Json} Json */
/**
 * @typedef {{turn: Json | null, node: number | null, messages: Json[], said: string, left: string}} Step a turn and the
 *   messages sent before it; `left` describes the parts that were not loaded, and is empty if everything was loaded
 */

const AROUND = 120; // characters shown before the first difference

/**
 * @param {import("../router.js").Place} place
 * @returns {import("../main.js").View}
 */
export function show(place) {
  const sides = [new Record(place.parts[0] ?? ""), new Record(place.parts[1] ?? "")];
  const element = el("div.page", null, loading());
  let at = -1;

  /** @param {number} to */
  function move(to) {
    const marks = [...element.querySelectorAll(".pair-mark")];
    if (!marks.length) return;
    at = Math.max(0, Math.min(marks.length - 1, to));
    marks[at].scrollIntoView({ block: "start" });
    /** @type {HTMLElement} */ (marks[at]).focus({ preventScroll: true });
    note(href(["compare", ...place.parts], { turn: at }));
  }

  const toFirst = () =>
    move([...element.querySelectorAll(".pair-mark")].findIndex((mark) => mark.classList.contains("is-first")));

  async function load(all = false) {
    try {
      await Promise.all(
        sides.map(async (side) => {
          await side.load();
          await side.converse();
          if (all) await side.complete();
        }),
      );
      fill(element, ...drawn(sides, toFirst, whole));
      document.title = seen(`${nameOf(sides[0].row)} and ${nameOf(sides[1].row)} · Turngate`);
      if (place.query.turn) move(Number(place.query.turn));
    } catch (error) {
      fill(
        element,
        failed(error, () => load(all)),
      );
    }
  }

  function whole() {
    fill(element, loading());
    load(true);
  }

  if (place.parts.length === 2) load();
  else fill(element, empty("Choose two rollouts", "Open a group, select two of its rollouts, and compare them."));
  return {
    element,
    title: "Comparison",
    keys: [
      { key: "j", does: "next turn", run: () => move(at + 1) },
      { key: "k", does: "previous turn", run: () => move(at - 1) },
      { key: "d", does: "first difference", run: toFirst },
    ],
  };
}

/** @param {Record[]} sides @param {() => void} toFirst @param {() => void} whole loads the omitted parts */
function drawn(sides, toFirst, whole) {
  const [left, right] = sides.map(steps);
  const both = Math.max(left.length, right.length);
  const first = firstDifference(left, right);
  const doubtful = [...left, ...right].filter((step) => step.left);
  const cut = doubtful.some((step) => step.messages.some((message) => message.cut));
  const sure = first === null || ![...left.slice(0, first), ...right.slice(0, first)].some((step) => step.left);
  const what = sure ? "First difference" : "First difference in the loaded parts";
  const group = sides[0].row.group;
  const heads = sides.map((side) =>
    el(
      "section.panel.side",
      null,
      el(
        "div.view-head",
        null,
        el("h2", null, el("a", { href: addressOf(side.id), text: nameOf(side.row) })),
        state(side.row),
      ),
      facts([
        ["reward", rewardCell(side.row.reward)],
        ["turns", count(side.row.turns)],
        ["sampled", count(side.row.sampled_tokens)],
        ["took", duration(side.row.seconds)],
      ]),
    ),
  );
  const pair = el("div.pair", null, ...heads);
  for (let i = 0; i < both; i++) {
    const apart = first !== null && i === first;
    const label = i === 0 ? "Start" : `Turn ${i}`;
    const where = apart
      ? `: the ${what.toLowerCase()}${i === both - 1 && left.length !== right.length ? ", because one rollout ends here" : ""}`
      : "";
    pair.append(el("div.pair-mark", { tabindex: "-1", class: apart ? "is-first" : "", text: `${label}${where}` }));
    const differ = apartAt(left[i], right[i]);
    pair.append(side(left[i], right[i], differ), side(right[i], left[i], differ));
  }
  const jump =
    first === null
      ? doubtful.length
        ? el("span.warn", { text: "No difference in the loaded parts." })
        : el("span.good", { text: "The conversations are identical." })
      : el(
          "button.button",
          { type: "button", on: { click: toFirst } },
          first === 0 ? `${what}: the first messages` : `${what}: turn ${first}`,
        );
  return [
    el(
      "div.crumbs",
      null,
      group
        ? el("a", { href: href(["group", group]), text: group })
        : el("a", { href: href(["rollouts"]), text: "Rollouts" }),
    ),
    el("div.view-head", null, el("h1", { text: "Side by side" }), jump),
    doubtful.length > 0 &&
      el(
        "p.banner",
        null,
        "Some parts were not compared: the middle of long texts, and content that is not text. They may differ. ",
        cut && el("button.button", { type: "button", text: "Load everything and compare", on: { click: whole } }),
      ),
    both ? pair : empty("Nothing to compare", "Neither rollout has any messages yet."),
  ];
}

/**
 * Return the main conversation in steps: its first messages, then each turn with the results of its calls.
 * @param {Record} record
 * @returns {Step[]}
 */
function steps(record) {
  /** @type {Step[]} */
  const found = [];
  for (const id of record.inOrder()) {
    const node = record.messages.get(id);
    if (!node) continue;
    if (node.kind === "sampled" || !found.length)
      found.push({ turn: node.kind === "sampled" ? node : null, node: id, messages: [...node.messages], said: "", left: "" });
    else found[found.length - 1].messages.push(...node.messages);
  }
  for (const step of found) {
    step.said = step.messages.map(spoken).join("\n");
    step.left = step.messages.map(leftOut).join("");
  }
  return found;
}

/** Convert a message to text for the comparison. The ids of tool calls are omitted, because they are random. @param {Json} message */
function spoken(message) {
  const calls = (message.tool_calls ?? []).map(
    (/** @type {Json} */ call) =>
      `${call.name} ${typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments)}`,
  );
  return [message.reasoning, textOf(message.content), ...calls].filter(Boolean).join("\n");
}

/** Return the lengths and kinds of a message's parts that cannot be compared, or "" if there are none. @param {Json} message */
function leftOut(message) {
  return message.cut || message.beyond ? JSON.stringify([message.cut ?? {}, message.beyond ?? ""]) : "";
}

/** Return whether two steps certainly differ. @param {Step | undefined} left @param {Step | undefined} right */
function apartAt(left, right) {
  return left?.said !== right?.said || left?.left !== right?.left;
}

/** @param {Step[]} left @param {Step[]} right */
function firstDifference(left, right) {
  for (let i = 0; i < Math.max(left.length, right.length); i++) if (apartAt(left[i], right[i])) return i;
  return null;
}

/** @param {Step | undefined} mine @param {Step | undefined} other @param {boolean} differ */
function side(mine, other, differ) {
  if (!mine) return el("div.panel.side.is-none", null, el("p.muted", { text: "This conversation has no more turns." }));
  const made = el("div.panel.side", { class: differ ? "is-different" : "" });
  if (differ && other && mine.said !== other.said) made.append(apart(mine, other));
  made.append(...mine.messages.map((message) => messageOf(message, null)));
  if (mine.turn)
    made.setAttribute(
      "aria-label",
      `Turn ${mine.turn.turn}: ${briefly(textOf(mine.messages[0]?.content)).slice(0, 80)}`,
    );
  return made;
}

/** Show the text around the first difference between two steps. @param {Step} one @param {Step} beside */
function apart(one, beside) {
  const [mine, other] = [one.said, beside.said];
  let same = 0;
  while (same < mine.length && same < other.length && mine[same] === other[same]) same += 1;
  const from = Math.max(0, same - 60);
  const rest = mine.slice(same, same + AROUND).split("\n", 1)[0] || mine.slice(same, same + AROUND);
  return el(
    "p.apart",
    { title: one.left || beside.left ? null : `Identical up to here: ${plural(same, "character")}` },
    from > 0 && "…",
    plain(mine.slice(from, same)),
    el("mark", null, rest ? plain(rest) : "(ends here)"),
    same + rest.length < mine.length && "…",
  );
}
