// Render what pymdownx.arithmatex marks as math. KaTeX is vendored beside this file, so this works offline.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: true });
}
