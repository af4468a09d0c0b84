/** One message: its role, text, thinking, tool calls and results. Long parts are folded. */

import { el } from "./dom.js";
import { bytes, count } from "./format.js";
import { block, firstLine, plain } from "./text.js";

/** @typedef {import("./api.js").Json} Json */

const FOLD = 1200; // characters; longer results and system prompts start folded

/**
 * @param {Json} message
 * @param {(() => void) | null} whole loads the omitted text; null if it cannot be loaded
 * @returns {HTMLElement}
 */
export function messageOf(message, whole) {
  const text = textOf(message.content);
  const made = el("div.message", { class: `is-${/^[a-z]+$/.test(message.role) ? message.role : "other"}` });
  if (message.reasoning)
    made.append(fold("thinking", firstLine(message.reasoning), message.reasoning, false, "is-thinking"));
  if (message.role === "tool")
    made.append(fold("result", firstLine(text) || "(empty)", text, text.length <= FOLD / 3, "is-result"));
  else if (message.role === "system" || message.role === "developer")
    made.append(fold(message.role, firstLine(text), text, false, "is-system"));
  else if (text) made.append(el("div.message-role", { text: message.role }), block(text));
  for (const call of message.tool_calls ?? []) made.append(callOf(call));
  if (message.beyond) made.append(el("p.message-note", { text: `Not shown: ${message.beyond}` }));
  if (message.cut) {
    const lengths = Object.entries(message.cut)
      .map(([field, length]) => `${field}: ${count(/** @type {number} */ (length))} characters`)
      .join(", ");
    const text = `The middle is omitted (${lengths} in total).`;
    made.append(
      whole
        ? el("button.more", { type: "button", on: { click: whole } }, `${text} Load everything`)
        : el("p.message-note", { text }),
    );
  }
  return made;
}

/**
 * Create a foldable part. Its text is created when it is first opened.
 * @param {string} kind
 * @param {string} line the line shown while folded
 * @param {string} text
 * @param {boolean} open
 * @param {string} look
 */
function fold(kind, line, text, open, look) {
  const size = el("span.fold-size", { text: bytes(text.length) });
  const head = el(
    "summary",
    null,
    el("span.fold-kind", { text: kind }),
    el("span.fold-line.clip", null, plain(line)),
    size,
  );
  const made = el("details.fold", { class: look }, head);
  const fillIn = () => made.childElementCount === 1 && made.append(block(text));
  made.addEventListener("toggle", () => made.open && fillIn());
  if (open) {
    fillIn();
    made.open = true;
  }
  return made;
}

/** @param {Json} call */
function callOf(call) {
  const shown = argumentsOf(call.arguments);
  const brief = el("span.fold-line.clip", null, plain(firstLine(briefly(call.arguments))));
  const head = el(
    "summary",
    null,
    el("span.fold-kind.is-call", null, plain(call.name || "(no name)")),
    brief,
    el("span.fold-size", { text: bytes(shown.length) }),
  );
  const made = el("details.fold.is-call", null, head);
  made.addEventListener("toggle", () => made.open && made.childElementCount === 1 && made.append(block(shown)));
  return made;
}

/** Format arguments: a JSON object with each name on its own line, other JSON indented, and other text unchanged. @param {any} given */
function argumentsOf(given) {
  const parsed = read(given);
  if (parsed === undefined) return String(given ?? "");
  if (parsed && typeof parsed === "object") {
    return Object.entries(parsed)
      .map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value, null, 2)}`)
      .join("\n");
  }
  return JSON.stringify(parsed, null, 2);
}

/** Return the first text argument, which is usually the command or the file. @param {any} given */
export function briefly(given) {
  const parsed = read(given);
  if (!parsed || typeof parsed !== "object") return String(given ?? "");
  const values = Object.values(parsed).filter((value) => typeof value === "string" && value);
  return values.length ? String(values[0]) : JSON.stringify(parsed);
}

/** @param {any} given */
function read(given) {
  if (typeof given !== "string") return given;
  try {
    return JSON.parse(given);
  } catch (error) {
    if (error instanceof SyntaxError) return undefined; // models sometimes write invalid JSON
    throw error;
  }
}

/** Return the text of a message's content, which is a string or a list of parts. @param {any} content @returns {string} */
export function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content))
    return content.map((part) => (typeof part === "string" ? part : (part?.text ?? JSON.stringify(part)))).join("\n");
  return JSON.stringify(content);
}
