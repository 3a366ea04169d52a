// What is hard to read on the page in the frame, as JSON in <pre>. A table may be wider than the page in a box that scrolls.
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach((each) => (each.open = true));
  const style = (element) => frame.contentWindow.getComputedStyle(element);
  const scrolls = (element) => element && (/auto|scroll/.test(style(element).overflowX) || scrolls(element.parentElement));
  const texts = [];
  const found = {scroll_width: root.scrollWidth, num_texts: 0, outside: [], small: [], cut: [], overlaps: [], faint: [], scrolls: []};
  found.dark = frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches;
  // Colors as red, green, blue and opacity; what is below shows through what is not opaque.
  const rgba = (text) => [...(text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number), 1].slice(0, 4);
  const over = (above, below) => [0, 1, 2].map((i) => above[i] * above[3] + below[i] * (1 - above[3])).concat(1);
  const ground = (element) => {
    if (!element) return found.dark ? [0, 0, 0, 1] : [255, 255, 255, 1];
    const own = rgba(style(element).backgroundColor);
    return own[3] === 1 ? own : over(own, ground(element.parentElement));
  };
  const luminance = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const value = color[i] / 255;
    return sum + weight * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  }, 0);
  // As WCAG 2.2 defines it, 1.4.3.
  const contrast = (element) => {
    const below = ground(element), ink = over(rgba(style(element)[element.closest("svg") ? "fill" : "color"]), below);
    const [low, high] = [luminance(ink), luminance(below)].sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05);
  };
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement, text = node.data.trim().slice(0, 60);
    if (!text || /^(STYLE|TITLE)$/i.test(element.tagName)) continue;
    const drawn = element.getScreenCTM ? Math.hypot(element.getScreenCTM().a, element.getScreenCTM().b) : 1;
    const size = parseFloat(style(element).fontSize) * drawn;
    if (size < 12) found.small.push(`${text}: ${size.toFixed(1)} px`);
    found.num_texts += 1;
    if (contrast(element) < 4.5) found.faint.push(`${text}: ${contrast(element).toFixed(1)}`);
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 1) continue;
      const drawing = element.closest("svg")?.getBoundingClientRect();
      if (drawing && (box.left < drawing.left - 1 || box.right > drawing.right + 1)) found.cut.push(text);
      if (!scrolls(element) && (box.left < 0 || box.right > root.clientWidth)) found.outside.push(text);
      // Lines may touch: what letters do not use above and below is left out.
      const kept = {text, top: box.top + 0.25 * box.height, bottom: box.bottom - 0.25 * box.height, left: box.left + 1, right: box.right - 1};
      for (const other of texts)
        if (other.left < kept.right && kept.left < other.right && other.top < kept.bottom && kept.top < other.bottom)
          found.overlaps.push(`${other.text} / ${text}`);
      texts.push(kept);
    }
  }
  for (const element of page.body.querySelectorAll("*"))
    if (/hidden|clip/.test(style(element).overflowX) && element.scrollWidth > element.clientWidth && element.textContent.trim())
      found.cut.push(element.textContent.trim().slice(0, 60));
  for (const element of page.querySelectorAll(".table"))
    if (element.scrollWidth > element.clientWidth + 1) found.scrolls.push(element.textContent.trim().slice(0, 60));
  document.querySelector("pre").textContent = JSON.stringify(found);
});
