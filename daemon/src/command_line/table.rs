//! Columns for people.

use super::terminal::{Screen, one_line};

/// The heading of a column, and what it shows of an item.
pub type Column<'a, T> = (&'a str, fn(&T) -> String);
/// Minimum width of a column on a terminal, unless its cells are narrower.
const NARROWEST: usize = 14;
/// Characters after which a cell may be broken into lines.
const BREAKS: [char; 3] = [',', ' ', '/'];

/// A table with a row for each item, in the width of the terminal.
pub fn table<T, const N: usize>(items: &[T], columns: [Column<'_, T>; N]) -> String {
    let rows = items
        .iter()
        .map(|item| columns.map(|(_, cell)| cell(item)).to_vec());
    let rows: Vec<Vec<String>> = rows.collect();
    let heading = columns.map(|(heading, _)| heading);
    render(&heading, &rows, Screen::current().width)
}

/// Rows under a heading, each column as wide as its widest cell.
fn render(heading: &[&str], rows: &[Vec<String>], width: Option<usize>) -> String {
    let heading: Vec<String> = heading.iter().map(|cell| (*cell).to_owned()).collect();
    let rows = rows.iter().map(|row| row.iter().map(|cell| one_line(cell)));
    let rows: Vec<Vec<String>> = rows.map(Iterator::collect).collect();
    let mut widths: Vec<usize> = heading.iter().map(|cell| cell.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    if let Some(width) = width {
        narrow(&mut widths, width);
    }
    let mut text = String::new();
    for row in std::iter::once(&heading).chain(&rows) {
        push_row(&mut text, &widths, row);
    }
    text
}

/// Makes the widest columns narrower until a line fits.
fn narrow(widths: &mut [usize], width: usize) {
    let gaps = 2 * widths.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > width {
        match widths.iter_mut().max() {
            Some(widest) if *widest > NARROWEST => *widest -= 1,
            _ => return,
        }
    }
}

fn push_row(text: &mut String, widths: &[usize], row: &[String]) {
    let cells = row.iter().zip(widths);
    let cells: Vec<Vec<String>> = cells.map(|(cell, width)| folded(cell, *width)).collect();
    let lines = cells.iter().map(Vec::len).max().unwrap_or_default();
    for number in 0..lines {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(&cells) {
            let part = cell.get(number).map_or("", String::as_str);
            line.push_str(part);
            let gap = (width + 2).saturating_sub(part.chars().count());
            line.extend(std::iter::repeat_n(' ', gap));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

/// The lines into which a cell is broken.
fn folded(cell: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut rest: Vec<char> = cell.chars().collect();
    while rest.len() > width {
        let fits = rest.get(..width).unwrap_or_default();
        let end = fits.iter().rposition(|c| BREAKS.contains(c));
        let after = rest.split_off(end.map_or(width, |end| end + 1));
        lines.push(rest.into_iter().collect());
        rest = after;
    }
    lines.push(rest.into_iter().collect());
    lines
}

/// A list in a cell; `-` if it is empty.
pub fn list<T: ToString>(items: &[T]) -> String {
    if items.is_empty() {
        return "-".to_owned();
    }
    let items: Vec<String> = items.iter().map(ToString::to_string).collect();
    items.join(",")
}

/// The cell of a value that may be absent; `-` if it is.
pub fn maybe<T: ToString>(value: Option<&T>) -> String {
    value.map_or_else(|| "-".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[[&str; 2]]) -> Vec<Vec<String>> {
        let of = |row: &[&str; 2]| row.iter().map(|cell| (*cell).to_owned()).collect();
        rows.iter().map(of).collect()
    }

    #[test]
    fn columns_line_up() {
        let text = render(&["ID", "NAME"], &rows(&[["1", "a"], ["1000", "b"]]), None);
        assert_eq!(text, "ID    NAME\n1     a\n1000  b\n");
        assert_eq!(list::<u32>(&[]), "-");
        assert_eq!(list(&[1, 2]), "1,2");
    }

    #[test]
    fn a_row_is_one_line_whatever_its_cells_hold() {
        let text = render(&["ID", "NAME"], &rows(&[["1", "a\nb\u{1b}[2J"]]), None);
        assert_eq!(text, "ID  NAME\n1   a\\nb\\u001b[2J\n");
    }

    #[test]
    fn on_a_terminal_wide_cells_are_folded() {
        let labels = "k8s:app=web,k8s:tier=front,k8s:io.kubernetes.pod.namespace=shop";
        let cells = rows(&[["1", labels], ["2", "-"]]);
        let text = render(&["ID", "LABELS"], &cells, Some(40));
        assert_eq!(
            text,
            "ID  LABELS\n1   k8s:app=web,k8s:tier=front,\n    k8s:io.kubernetes.pod.namespace=shop\n2   -\n"
        );
        let word = "x".repeat(100);
        let text = render(&["ID", "NAME"], &rows(&[["1", &word]]), Some(40));
        assert!(text.lines().all(|line| line.len() <= 40), "{text}");
        assert_eq!(text.matches('x').count(), 100);
    }
}
