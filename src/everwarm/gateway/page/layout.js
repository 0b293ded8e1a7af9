// Where the nodes of the prefix tree are: x in tokens, y in rows. Pure, one pass: parents come before children.

/**
 * The first child goes on in its parent's row, every other one begins a new row below.
 * Nodes whose parent is not there (a page was lost) are left out.
 */
export function layout(nodes) {
  const places = new Map();
  const rows = [];
  let most = 1;
  for (const node of nodes) {
    const parent = node.parent === null ? null : places.get(node.parent);
    if (parent === undefined) continue;
    const isFirst = parent !== null && parent.children.length === 0;
    const row = isFirst ? parent.row : rows.length;
    if (row === rows.length) rows.push([]);
    const place = { node, parent, row, nth: rows[row].length, children: [] };
    parent?.children.push(place);
    rows[row].push(place);
    places.set(node.id, place);
    if (node.end > most) most = node.end;
  }
  return { places, rows, n_tokens: most };
}

/** The node at a place: the one of the row that covers the token, or the nearest in it. */
export function nearest(rows, row, token) {
  const all = rows[row];
  if (!all?.length) return null;
  let low = 0;
  let high = all.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (all[middle].node.end < token) low = middle + 1;
    else high = middle;
  }
  return all[low];
}

/** A node and all it stands on. */
export function lineage(place) {
  const found = [];
  for (let at = place; at; at = at.parent) found.push(at);
  return found;
}

/** The hottest tier that something is in. */
export function tierOf(tiers) {
  return ["device", "ram", "disk"].find((tier) => tiers.includes(tier)) ?? null;
}
