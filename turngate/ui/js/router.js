/**
 * Addresses. Every view has one, after the `#`, for bookmarks, links and the back button. Views create links with `href` and navigate
 * with `go`.
 *
 *     #/rollouts?status=running        #/rollout/r-1/tokens?node=4&token=17        #/compare/r-1/r-2?turn=3
 */

/**
 * @typedef {{name: string, parts: string[], query: Object<string, string>}} Place `name` is the view, `parts` what follows it
 */

/**
 * @param {string} hash
 * @returns {Place}
 */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [name, ...parts] = path.split("/").filter(Boolean).map(decoded);
  return { name: name ?? "", parts, query: Object.fromEntries(new URLSearchParams(search)) };
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (error instanceof URIError) return part; // such as a lone % typed by the user
    throw error;
  }
}

/**
 * Return the address of a view.
 * @param {string[]} path
 * @param {Object<string, string | number | null | undefined>} [query] empty values are omitted
 */
export function href(path, query = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") search.set(name, String(value));
  }
  const text = search.toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** @returns {Place} */
export function here() {
  return parse(location.hash);
}

/**
 * @param {string} address as returned by `href`
 */
export function go(address) {
  location.hash = address;
}

/**
 * Change the address without navigating, to reflect what a view currently shows.
 * @param {string} address
 */
export function note(address) {
  history.replaceState(null, "", address);
}
