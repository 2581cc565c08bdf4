//! Keys, as the browser is sent them.

use serde_json::Value;

/// Bit of the Shift key among the modifiers.
const SHIFT: u8 = 8;

/// A key that is pressed and released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// To the next element.
    Tab,
    /// Shift and Tab: to the element before.
    BackTab,
    /// Follows a link, sends a form.
    Enter,
    /// Presses a button.
    Space,
    /// Leaves something.
    Escape,
    /// Arrow.
    Left,
    /// Arrow.
    Right,
    /// Arrow.
    Up,
    /// Arrow.
    Down,
    /// To the start.
    Home,
    /// To the end.
    End,
}

impl Key {
    /// Returns the parameters of the two events: the key goes down, and up.
    pub(super) fn events(self) -> [Vec<(&'static str, Value)>; 2] {
        // Names and codes: "UI Events KeyboardEvent key Values" of the W3C; Windows' virtual key codes.
        let (key, code, number, text) = match self {
            Self::Tab | Self::BackTab => ("Tab", "Tab", 9, None),
            Self::Enter => ("Enter", "Enter", 13, Some("\r")),
            Self::Space => (" ", "Space", 32, Some(" ")),
            Self::Escape => ("Escape", "Escape", 27, None),
            Self::End => ("End", "End", 35, None),
            Self::Home => ("Home", "Home", 36, None),
            Self::Left => ("ArrowLeft", "ArrowLeft", 37, None),
            Self::Up => ("ArrowUp", "ArrowUp", 38, None),
            Self::Right => ("ArrowRight", "ArrowRight", 39, None),
            Self::Down => ("ArrowDown", "ArrowDown", 40, None),
        };
        let modifiers = if self == Self::BackTab { SHIFT } else { 0 };
        let event = |kind: &str| {
            vec![
                ("type", Value::from(kind)),
                ("key", key.into()),
                ("code", code.into()),
                ("windowsVirtualKeyCode", number.into()),
                ("modifiers", modifiers.into()),
            ]
        };
        let mut down = event(if text.is_some() { "keyDown" } else { "rawKeyDown" });
        down.extend(text.map(|text| ("text", text.into())));
        [down, event("keyUp")]
    }
}
